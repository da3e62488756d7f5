"""docs/reproduction.md says what the pages of the experiments say, and hides no missed goal."""

from slackwater.loadgen.reproduce.page import DOCS, SECTIONS, page, pollux, tables, tiresias


def test_the_page_is_up_to_date() -> None:
    written = (DOCS / "reproduction.md").read_text()
    remedy = "run python -m slackwater.loadgen.reproduce.page"
    assert written == page(DOCS / "reproduction"), remedy
    assert "Not run" not in written


def test_tables_by_heading() -> None:
    text = "## A\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n## B\n| z |\n| --- |\n| 3 |\n| 4 |\n"
    assert tables(text) == {"A": [{"x": "1", "y": "2"}], "B": [{"z": "3"}, {"z": "4"}]}


def test_a_missed_goal_is_told_first() -> None:
    folder = DOCS / "reproduction"
    sources = {name: (folder / f"{name}.md").read_text() for name in SECTIONS}
    worse = sources["pollux"].replace("2446 / 2466 (1.008)", "2446 / 2646 (1.082)")
    assert worse != sources["pollux"]
    rows = {row.what: row.met for row in pollux(worse)}
    assert rows["workload 6, average JCT (s), pollux"] == "**no**"
    assert all(row.met != "**no**" for row in pollux(sources["pollux"]))
    exact = sources["tiresias"].replace("| equal |", "| DIFFERENT |", 1)
    assert [row.met for row in tiresias(exact)].count("**no**") == 1
