"""How long, as people write it (90s, 10m, 1h30m, 2d), and when, by the clock on the wall."""

import re
from datetime import datetime
from typing import Final

from slackwater.console.outcome import Usage

_UNITS: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_PART: Final = r"(\d+(?:\.\d+)?)([dhms])"
LONGEST_DAYS: Final = 36_500


def seconds(text: str, option: str) -> float:
    """Parse a duration in seconds; a number alone is seconds. Raises Usage."""
    given = text.strip().lower()
    if re.fullmatch(r"\d+(?:\.\d+)?", given):
        given += "s"
    if not re.fullmatch(f"(?:{_PART})+", given):
        raise Usage(f"{option} {text!r}: write how long, such as 90s, 10m, 1h30m or 2d")
    total_s = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, given))
    if total_s > LONGEST_DAYS * _UNITS["d"]:
        raise Usage(f"{option} {text!r}: it can be {LONGEST_DAYS}d at most")
    return total_s


def clock(at_s: float, now_s: float) -> str:
    """Show a time since 1970 by the local clock; of another day, with its date."""
    then, now = (datetime.fromtimestamp(each).astimezone() for each in (at_s, now_s))
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")
