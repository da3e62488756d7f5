"""Ends the rank of a program that did not close its Agent: it is done, unless an exception ended
it.

At exit one cannot ask whether the program failed, so what reaches `sys.excepthook` is remembered.
"""

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

from slackwater.common.base.errors import SlackwaterError

_crashed: list[BaseException] = []
"""Holds the exception that ended the program, if one did."""


def crash() -> BaseException | None:
    """Return the exception that ends the program; None: it just ends, or goes on."""
    return _crashed[0] if _crashed else None


def at_exit(
    close: Callable[[], None], give_up: Callable[[BaseException], None]
) -> Callable[[], None]:
    """Register one of both for the interpreter's end. Return what `atexit.unregister` takes. The
    end of a forked child does not count as this program's end."""
    program = os.getpid()

    def leave() -> None:
        if os.getpid() != program:
            return
        error = crash()
        if error is not None:
            give_up(error)
            return
        try:
            close()
        except SlackwaterError as failure:
            # An error at exit would not change the exit code, by which the job is judged.
            sys.stderr.write(f"slackwater: {failure}\n")
            sys.stderr.flush()
            os._exit(1)

    _watch()
    atexit.register(leave)
    return leave


def _watch() -> None:
    previous = sys.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def remember(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _crashed.append(error)
        previous(kind, error, trace)

    sys.excepthook = remember
