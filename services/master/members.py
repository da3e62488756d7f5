"""Forget members of a pool that have not been heard for long. Pure.

An id that nobody uses any more would stay for ever otherwise: machines that come and go by
themselves have new ones each time.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

K = TypeVar("K")

KEPT_S: Final = 86_400.0
"""Seconds for which a silent member is shown. Where there is no room for a new one, the one that
has been silent for longest makes some."""


def outdated(seen_s: Mapping[K, float], now_s: float) -> list[K]:
    """Return the members that were not heard for KEPT_S. `seen_s`: when each was, last."""
    return [key for key, last_s in seen_s.items() if now_s - last_s > KEPT_S]


def longest_silent(seen_s: Mapping[K, float], now_s: float, silent_s: float) -> K | None:
    """Return the member to forget for another one; None: all were heard within `silent_s`."""
    key = min(seen_s, key=lambda key: seen_s[key], default=None)
    return None if key is None or now_s - seen_s[key] <= silent_s else key
