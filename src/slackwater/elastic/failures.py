"""Tell what a program raised, in one sentence, and at length in the log of its rank."""

import sys
import traceback
from pathlib import Path
from typing import Final

from slackwater.common.base.errors import Rejected

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
