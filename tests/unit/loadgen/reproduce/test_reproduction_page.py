"""docs/reproduction.md says what the pages of the experiments say, and hides no missed goal."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.loadgen.reproduce.page import DOCS, NOT_MET, groups, page, speed, stated, tables
from slackwater.loadgen.reproduce.verdict import COLUMNS, REPORTED, Row, is_met, judged, table

FOLDER = DOCS / "reproduction"
PUBLISHED = re.compile(r"\bpaper|\bpublished|\bfigures? \d|\btables? \d", re.IGNORECASE)
MEASURED_PEER = re.compile(r"[\d.e+]+ [^(]+ \(.+\)")
"""A cell as `benchmarks/pages.py` writes it where a peer was measured and no goal is set."""


def rows() -> Iterator[Row]:
    for group in groups(FOLDER):
        yield from group.rows


def missed(text: str) -> list[str]:
    section = text.partition("## What misses its goal\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("- ")]


def test_the_page_is_up_to_date() -> None:
    written = (DOCS / "reproduction.md").read_text()
    remedy = "run python -m slackwater.loadgen.reproduce.page"
    assert written == page(FOLDER), remedy
    assert "Not run" not in written


def test_tables_by_heading() -> None:
    text = "## A\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n## B\n| z |\n| --- |\n| 3 |\n| 4 |\n"
    assert tables(text) == {"A": [{"x": "1", "y": "2"}], "B": [{"z": "3"}, {"z": "4"}]}


def test_every_miss_is_listed_first() -> None:
    misses = [row for row in rows() if row.met in NOT_MET]
    assert misses
    listed = missed(page(FOLDER))
    assert len(listed) == len(misses)
    for row in misses:
        assert any(line.startswith(f"- {row.what}: {row.ours}") for line in listed), row.what


@pytest.mark.parametrize("met", NOT_MET)
def test_a_miss_cannot_be_left_out(tmp_path: Path, met: str) -> None:
    """It is listed whichever page states it, under any heading."""
    row = Row("a figure", "5 (published)", "7", "1.4", met, "make it")
    (tmp_path / "another.md").write_text("# Another\n\n## Deep\n\n" + "\n".join(table([row])))
    assert missed(page(tmp_path)) == ["- a figure: 7, ratio 1.4. Goal: 5 (published)."]


def test_an_unknown_verdict_is_refused(tmp_path: Path) -> None:
    row = Row("a figure", "5", "7", "1.4", "almost", "make it")
    (tmp_path / "another.md").write_text("# Another\n\n" + "\n".join(table([row])))
    with pytest.raises(ValueError, match=r"another\.md: met is 'almost' for 'a figure'"):
        page(tmp_path)


def test_a_published_figure_has_a_verdict() -> None:
    """`reported` is for what nobody published and no goal bounds."""
    for row in rows():
        if row.met == REPORTED:
            assert not PUBLISHED.search(row.goal), f"{row.what}: {row.goal}"
            bare = not re.search(r"\d", row.goal) or MEASURED_PEER.fullmatch(row.goal)
            assert bare, f"{row.what}: {row.goal}"


def test_a_published_figure_stands_in_a_row_with_a_verdict() -> None:
    """A table that names one and lacks the columns of a row would be read by nobody."""
    for source in sorted(FOLDER.glob("*.md")):
        for heading, found in tables(source.read_text()).items():
            for row in found:
                if not set(COLUMNS) <= set(row) and "performance" not in "".join(row):
                    cells = " ".join([*row, *row.values()])
                    named = re.search(r"\(paper|\(published", cells)
                    assert not named, f"{source.name}, {heading}: {cells}"


def test_met_is_on_the_better_side_or_within_a_twentieth() -> None:
    assert is_met(100, 96, "more")
    assert not is_met(100, 94, "more")
    assert is_met(100, 104, "less")
    assert not is_met(100, 106, "less")
    assert is_met(100, 50, "less")
    assert not is_met(100, 50, "equal")
    assert judged("x", 1.06, 1.35, "less", "c").met == "**no**"


def test_speed_is_judged_from_what_the_benchmarks_print() -> None:
    text = (FOLDER / "speed.md").read_text()
    by_name = {row.what: row for row in speed(text)}
    plan = by_name["re-plan of 10,000 active jobs, tiresias-las"]
    assert plan.goal == "<= 100 ms"
    slower = text.replace(f"tiresias-las: {plan.ours}", "tiresias-las: 101 ms")
    assert {row.what: row.met for row in speed(slower)}[plan.what] == "**no**"


def test_verdicts_are_read_as_they_are_written() -> None:
    row = judged("what saves", 35, 27, "more", "do it", "{:.0f} %")
    assert list(stated("\n".join(table([row])))) == [row]
    assert row.met == "**no**"
    assert row.goal == "at least 35 % (published)"
