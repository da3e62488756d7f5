"""Tell what a program raised, in one sentence, and at length in the log of its rank. It would raise
it again: its process ends with the exit code that says so."""

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from slackwater.agent.identity import JOB
from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.schemas.workers import USELESS_TO_RESTART

_PACKAGE: Final = str(Path(__file__).parent.parent)


def last_words(error: Exception) -> str:
    """Say what was raised, and where in the program; the traceback goes to stderr."""
    sys.stderr.write("".join(traceback.format_exception(error)))
    sys.stderr.flush()
    said = str(error) if isinstance(error, Rejected) else f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    if not own:
        return said
    last = own[-1]
    return f"{said} ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def end_ranks_that_raise() -> None:
    """Let the process of a rank that raises outside of its tasks, while its file is read for
    instance, not be started again. Others end as they would."""
    previous = sys.excepthook

    def say(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        previous(kind, raised, trace)
        own = isinstance(raised, Rejected) or not isinstance(raised, SlackwaterError)
        if JOB in os.environ and isinstance(raised, Exception) and own:
            raise SystemExit(USELESS_TO_RESTART)

    sys.excepthook = say
