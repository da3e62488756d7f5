"""The comparison with other tools: at least forty rows, and each "yes" has a test that shows it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guide" / "compare.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [each for each in cells if each[0] not in ("what", "---")]


def test_there_are_at_least_forty_rows_of_four_cells() -> None:
    assert len(rows()) >= 40
    assert {len(each) for each in rows()} == {4}


def test_each_yes_names_a_test_that_exists() -> None:
    for what, _, here, shown in rows():
        named = re.findall(r"`([a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`", shown)
        assert named or not here.startswith("yes"), f"{what}: which test shows it?"
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            defined = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in defined, f"{what}: {file} has no {name}"


def test_the_price_of_lent_memory_is_the_paper_s_sum() -> None:
    """Repeat the sum of Infiniswap, section 2.7.6, from its table 2.2."""
    watts = 8.41 + 231 / 32
    assert round(watts * (0.04 + 0.72 * 1.1 * 0.067), 2) == 1.45
    assert "= 1.45 $ a month" in PAGE.read_text()
