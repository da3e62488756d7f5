"""Parameters that a trial's program is told, and values that it tells on the way.

Parameters are in the environment. A value is a line that the program prints, which the search reads
from the job's log: it outlives both of them, and people read it, too.
"""

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from slackwater.common.base.errors import Rejected

Parameter = float | int | str | bool

PARAMETERS: Final = "TUNE_PARAMETERS"
"""A JSON object."""
_MARK: Final = "slackwater.tune:"
_LINE: Final = re.compile(rb"^slackwater\.tune: step=(\d{1,15}) value=(\S{1,32})$", re.MULTILINE)


class Told(NamedTuple):
    """A value that a trial reached."""

    step: int
    value: float


def parameters() -> dict[str, Parameter]:
    """Return this trial's parameters; empty where the program runs on its own. Raises Rejected for
    an environment that is damaged."""
    text = os.environ.get(PARAMETERS, "{}")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Rejected(f"{PARAMETERS} is {text[:80]!r}: {error}; unset it") from error
    if not isinstance(found, dict):
        raise Rejected(f"{PARAMETERS} is {text[:80]!r}, not a JSON object; unset it")
    return found


def report(value: float, step: int) -> None:
    """Tell the search the value after a step (an epoch, say); the last one counts in the end. Steps
    count from 0 up. Raises Rejected for what it could not read."""
    if step < 0 or not math.isfinite(value):
        raise Rejected(f"a value of {value} at step {step}: give a finite one, a step from 0 up")
    sys.stdout.write(f"{_MARK} step={step} value={value!r}\n")
    sys.stdout.flush()


def told(printed: bytes) -> tuple[list[Told], int]:
    """Return the values in what was printed, and how many of its bytes were read: whole lines."""
    whole = printed.rfind(b"\n") + 1
    found = []
    for step, text in _LINE.findall(printed[:whole]):
        try:
            value = float(text)
        except ValueError:
            continue  # Somebody else's line.
        if math.isfinite(value):
            found.append(Told(int(step), value))
    return found, whole


def environment(values: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the variables that tell a trial's program its parameters."""
    return {PARAMETERS: json.dumps(dict(values), sort_keys=True)}
