"""Sizes as people write them: 64G, 512M, 4096."""

import re
from typing import Final

import typer

from slackwater.console.usage import shown

BYTES_MAX: Final = 2**53
_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def size_bytes(text: str, option: str) -> int:
    """Powers of 1024. Raises BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = float(found[1]) * _UNITS[found[2].upper()] if found else -1.0
    if not 0 <= nbytes <= BYTES_MAX:
        raise typer.BadParameter(f"{option} {shown(text)}: write a size such as 64G or 512M")
    return int(nbytes)


def human(nbytes: float) -> str:
    """At most four digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 10 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
