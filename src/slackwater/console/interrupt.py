"""Ctrl-C while a command is still being loaded: one word, exit code 130, and no traceback.

An import that is interrupted raises out of whatever line runs, and out of callbacks in which Python
can only print it. While nothing is held that would have to be given back, the process ends at once.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
SAID: Final = "interrupted"


def at_once() -> None:
    """Let Ctrl-C end the process on the spot, unless it is ignored (nohup) or handled."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def by_exception() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for work that has something to give back."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def loading() -> Iterator[None]:
    """Import something within this: Ctrl-C ends the process at once meanwhile."""
    before = signal.getsignal(signal.SIGINT)
    at_once()
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            by_exception()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{SAID}\n".encode())
    os._exit(INTERRUPTED)
