"""A figure beside the published one, and whether it is met: the rows of docs/reproduction.

A published figure is met if ours lies on its better side or within `TOLERANCE` of it; otherwise it
is missed. Where ours was got under other conditions the row says which, and has no verdict.
"""

from typing import Final, Literal, NamedTuple

TOLERANCE: Final = 0.05

Better = Literal["more", "less", "equal"]

COLUMNS: Final = ("figure", "published or goal", "ours", "ratio", "met", "command")
YES: Final = "yes"
MISSED: Final = "**no**"
REPORTED: Final = "reported"
"""No figure was published, and no goal is set."""
UNLIKE: Final = "not comparable"


class Row(NamedTuple):
    what: str
    goal: str
    ours: str
    ratio: str
    met: str
    command: str


def yes(met: bool) -> str:
    return YES if met else MISSED


def is_met(published: float, ours: float, better: Better, tolerance: float = TOLERANCE) -> bool:
    low, high = published * (1 - tolerance), published * (1 + tolerance)
    match better:
        case "more":
            return ours >= low
        case "less":
            return ours <= high
        case "equal":
            return low <= ours <= high


def judged(
    what: str,
    published: float,
    ours: float,
    better: Better,
    command: str,
    form: str = "{:.2f}",
    *,
    tolerance: float = TOLERANCE,
) -> Row:
    """`form` shows a figure with its unit."""
    side = {"more": "at least ", "less": "at most ", "equal": ""}[better]
    return Row(
        what, f"{side}{form.format(published)} (published)", form.format(ours),
        f"{ours / published:.3f}", yes(is_met(published, ours, better, tolerance)), command,
    )  # fmt: skip


def unlike(what: str, published: str, ours: str, why: str, command: str) -> Row:
    """`published` stands beside ours, but was got under other conditions: `why`."""
    return Row(what, f"{published} (published; {why})", ours, "-", UNLIKE, command)


def reported(what: str, ours: str, command: str) -> Row:
    return Row(what, "-", ours, "-", REPORTED, command)


def table(rows: list[Row]) -> list[str]:
    """The rows as a table that docs/reproduction.md takes over as it is."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    return [*lines, *(f"| {' | '.join(row[:5])} | `{row.command}` |" for row in rows)]
