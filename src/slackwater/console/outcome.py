"""The outcome of a command: exit codes for scripts, one line for people, JSON on request.

0   done                            69  nobody answers at the URL
1   failed                          75  try again later
2   wrong usage                     78  a configuration that cannot be used
3   finished, but inconclusive     130  interrupted
65  the request or its input is at fault
"""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, TypeVar

import msgspec
import structlog
import typer
from rich.console import Console

from slackwater.common.base.errors import (
    ConfigRejected,
    Rejected,
    Retryable,
    SlackwaterError,
    Unavailable,
)
from slackwater.console.documents import whole

T = TypeVar("T")

FAILED: Final = 1
USAGE: Final = 2
INCONCLUSIVE: Final = 3
DATA_ERROR: Final = 65
UNAVAILABLE: Final = 69
TRY_LATER: Final = 75
CONFIG_ERROR: Final = 78

_PATH_SHOWN_CHARS: Final = 200

out = Console(width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def noted(note: str) -> None:
    """Print a note beside the command's answer."""
    err.print(note, markup=False)


class Usage(Rejected):
    """The command line itself is at fault: an option's value, or options that exclude each other
    or would do nothing."""


def logs_to_stderr() -> None:
    """Send log lines to stderr, so that they do not mix with the command's answer on stdout."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def exit_code(error: SlackwaterError) -> int:
    match error:
        case Usage():
            return USAGE
        case Unavailable():
            return UNAVAILABLE
        case Retryable():
            return TRY_LATER
        case ConfigRejected():
            return CONFIG_ERROR
        case Rejected():
            return DATA_ERROR
        case _:
            return FAILED


@contextmanager
def reported(rejected: int = DATA_ERROR) -> Iterator[None]:
    """Expected errors become one line on stderr and an exit code; anything else is a bug and
    keeps its traceback. `rejected`: the code where only options can be refused."""
    try:
        yield
    except SlackwaterError as error:
        err.print(f"error: {error}", markup=False)
        code = exit_code(error)
        raise typer.Exit(rejected if code == DATA_ERROR else code) from error
    except FileNotFoundError as error:
        err.print(f"error: {error.filename}: no such file", markup=False)
        raise typer.Exit(DATA_ERROR) from error
    except FileExistsError as error:
        err.print(f"error: {error.filename}: a file, not a folder; name another", markup=False)
        raise typer.Exit(DATA_ERROR) from error
    except OSError as error:
        if error.filename is None:  # The user named no file.
            raise
        name = str(error.filename)[:_PATH_SHOWN_CHARS]
        err.print(f"error: {name}: {error.strerror}; name another", markup=False)
        raise typer.Exit(DATA_ERROR) from error


def report_folder(folder: Path) -> None:
    """Make the folder, and find out before minutes are spent whether it can be written. Raises
    OSError, of which `reported` makes a line."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        pass


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run for a command that starts processes or folders of its own: SIGTERM ends it as
    Ctrl-C does, so that they are gone before it is."""

    async def until_terminated() -> T:
        ours = asyncio.current_task()
        assert ours is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ours.cancel)
        return await work

    try:
        return asyncio.run(until_terminated())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, for scripts, with every field of every record."""
    text = msgspec.json.format(msgspec.json.encode(whole(value)), indent=2)
    sys.stdout.write(text.decode() + "\n")
