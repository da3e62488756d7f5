"""Forget members of a pool that have not been heard for long. Pure.

An id that nobody uses any more would stay for ever otherwise: machines that come and go by
themselves have new ones each time.
"""

from collections.abc import Iterable
from typing import Final, TypeVar

K = TypeVar("K")

KEPT_S: Final = 86_400.0
"""Seconds for which a silent member is shown. A new one that has no room takes the place of the one
that has been silent for longest."""


def outdated(seen_s: Iterable[tuple[K, float]], now_s: float) -> list[K]:
    """Return the members that were not heard for KEPT_S. `seen_s`: each, and when it was, last."""
    return [key for key, last_s in seen_s if now_s - last_s > KEPT_S]


def longest_silent(seen_s: Iterable[tuple[K, float]], now_s: float, silent_s: float) -> K | None:
    """Return the member to forget for another one; None: all were heard within `silent_s`."""
    key, last_s = min(seen_s, key=lambda each: each[1], default=(None, now_s))
    return key if now_s - last_s > silent_s else None
