"""The style, as tests: what a reviewer would otherwise say again and again.

Rules of layout and dependency come from ARCHITECTURE.md. Functions that were long when a rule came
may stay listed in LONG_FUNCTIONS; the list may only shrink.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schemas", "common", "services", "loadgen", "src/slackwater", "benchmarks", "examples")
FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 500
LONG_FUNCTIONS: frozenset[str] = frozenset()
LONG_MODULES: frozenset[str] = frozenset()

OBSCURE_STARTS = {"...", "Of", "Who", "Whose", "Whom", "Whoever", "What", "Whatever", "As", "Those"}
"""Words at which a reader does not know yet what a docstring is about."""

OBSCURE_MAX = {
    "schemas": 41, "common": 161, "services": 146, "loadgen": 103, "src": 96, "benchmarks": 28,
    "examples": 0, "tests": 146,
}  # fmt: skip
"""Docstrings in each folder that begin so. These numbers may only fall: lower one with each that
you mend."""

LAYERS = {
    "schemas": {"schemas"},
    "common": {"schemas", "common"},
    "services": {"schemas", "common", "services"},
    "agent": {"schemas", "common", "agent"},
    "memory": {"schemas", "common", "agent"},
    "loadgen": {"schemas", "common", "agent", "loadgen"},
}
"""What each may import of ours; the command line and tests may import everything."""

PURE_BANNED = {"asyncio", "os", "time", "socket", "subprocess", "threading", "nats", "logging"}
"""A core or policy decides; it does no I/O and reads no clock."""

PURE_MODULES = {
    "core", "config", "schedule", "task_scheduling", "slot_plans", "clusters", "pool", "snapshot",
    "state", "events", "eviction", "drain_record", "progress",
}  # fmt: skip
"""Of a service: what decides beside its policies, and may run under the simulator's event heap."""


@cache
def modules() -> tuple[Path, ...]:
    """Every Python file of ours once (the links under src/slackwater lead back to the folders)."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            linked = parts[:2] == ("src", "slackwater") and (ROOT / Path(*parts[:3])).is_symlink()
            if not linked:
                found.append(path)
    return tuple(sorted(found))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[2].removesuffix(".py") if parts[0] == "src" else parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Full names of everything imported, at any depth of the file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def test_every_module_says_what_it_is() -> None:
    silent = [
        name(path)
        for path in modules()
        if path.stat().st_size and not ast.get_docstring(tree(path))
    ]
    assert not silent, f"a module docstring is missing: {silent}"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, also of those below constants and fields."""
    for node in ast.walk(tree(path)):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else ():
            match line:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield line.lineno, text


@pytest.mark.parametrize("folder", OBSCURE_MAX)
def test_docstrings_begin_with_a_verb_or_a_name(folder: str) -> None:
    """`Of the job: ...` is read twice, `The job's ...` once."""
    obscure = [
        f"{name(path)}:{line}"
        for path in (*modules(), *(ROOT / "tests").rglob("*.py"))
        if path.relative_to(ROOT).parts[0] == folder
        for line, text in docstrings(path)
        if text.split()[:1] and text.split()[0].rstrip(",:;") in OBSCURE_STARTS
    ]
    assert len(obscure) <= OBSCURE_MAX[folder], f"say it with a verb or a name: {obscure}"


def test_functions_fit_a_screen() -> None:
    long = {
        f"{name(path)}:{node.name}"
        for path in modules()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert long <= LONG_FUNCTIONS, f"over {FUNCTION_LINES_MAX} lines: {long - LONG_FUNCTIONS}"
    assert long >= LONG_FUNCTIONS, f"no longer long, drop from the list: {LONG_FUNCTIONS - long}"


def test_modules_hold_one_idea() -> None:
    long = {
        name(path) for path in modules() if len(path.read_text().splitlines()) > MODULE_LINES_MAX
    }
    assert long == LONG_MODULES, f"over {MODULE_LINES_MAX} lines: {long ^ LONG_MODULES}"


def test_dependencies_point_one_way() -> None:
    """schemas <- common <- services and the Agent library <- loadgen <- the command line."""
    wrong = []
    for path in modules():
        allowed = LAYERS.get(layer(path))
        if allowed is None:
            continue
        for imported, line in imports(path):
            parts = imported.split(".")
            if parts[0] != "slackwater" or len(parts) < 2:
                continue
            target = parts[1]
            simulated = name(path).startswith("loadgen/simulator") and target == "services"
            if target in {"Agent", "torch", "memory"}:
                target = "agent"
            if target not in allowed and not simulated and target in {*LAYERS, "cli"}:
                wrong.append(f"{name(path)}:{line} imports {imported}")
    assert not wrong, wrong


def test_services_never_import_one_another() -> None:
    wrong = []
    for path in modules():
        parts = path.relative_to(ROOT).parts
        if parts[0] != "services" or len(parts) < 3:
            continue
        for imported, line in imports(path):
            words = imported.split(".")
            if words[:2] == ["slackwater", "services"] and words[2] != parts[1]:
                wrong.append(f"{name(path)}:{line} imports {imported}")
    assert not wrong, wrong


def test_the_simulator_imports_only_pure_parts_of_services() -> None:
    wrong = []
    for path in modules():
        if not name(path).startswith("loadgen/simulator"):
            continue
        for imported, line in imports(path):
            words = imported.split(".")
            service = words[:2] == ["slackwater", "services"]
            if service and words[3] not in {"policies", "scheduling", *PURE_MODULES}:
                wrong.append(f"{name(path)}:{line} imports {imported}")
    assert not wrong, wrong


def is_pure(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    served = parts[0] == "services" and bool(
        {"policies", "scheduling"} & set(parts) or path.stem in PURE_MODULES
    )
    return path.name == "core.py" or served


def test_cores_and_policies_are_pure() -> None:
    wrong = [
        f"{name(path)}:{line} imports {imported}"
        for path in modules()
        if is_pure(path)
        for imported, line in imports(path)
        if imported.split(".")[0] in PURE_BANNED
    ]
    assert not wrong, wrong


def test_nothing_is_left_for_later() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
    left = [
        f"{name(path)}:{number}"
        for path in modules()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not left, left


def test_no_exception_is_swallowed() -> None:
    """A bare `except`, or `except Exception` whose body is only `pass`."""
    wrong = []
    for path in modules():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            if broad and silent:
                wrong.append(f"{name(path)}:{node.lineno}")
    assert not wrong, wrong


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "manager.py"}
    assert not [name(path) for path in modules() if path.name in drawers]


def papers_rows() -> list[list[str]]:
    page = ROOT / "docs" / "papers.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_papers_page_names_what_exists() -> None:
    """docs/papers.md: every file in backticks is there."""
    missing = [
        file
        for row in papers_rows()
        for cell in row
        for file in re.findall(r"`([\w/.-]+\.(?:py|md|toml|sh))`", cell)
        if not (ROOT / file).exists()
    ]
    assert not missing, missing


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing, f"{page}: {missing}"
