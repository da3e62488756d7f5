"""The style, as tests: what a reviewer would otherwise say again and again.

Rules of layout and dependency come from ARCHITECTURE.md. Functions that were long when a rule came
may stay listed in LONG_FUNCTIONS; the list may only shrink.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schemas", "common", "services", "loadgen", "src/slackwater", "benchmarks", "examples")
FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 500
LONG_FUNCTIONS: frozenset[str] = frozenset()
LONG_MODULES: dict[str, str] = {}
"""Module -> why one idea needs more lines. The idea decides where a module is cut."""

OBSCURE_STARTS = {
    "Of", "Who", "Whose", "Whom", "Whoever", "What", "Whatever", "Which", "Whichever", "As",
    "Those", "Nobody", "Or",
}  # fmt: skip
"""Words at which a reader does not know yet what a docstring or a comment is about."""

FLOORS = (
    "schemas",
    "common.base", "common.native", "common.transport", "common.bus", "common.store",
    "common.shell", "common.domains", "common.embedded",
    "services", "agent",
    "memory.store", "memory.pages", "memory.prefetch", "memory.control", "memory.resilience",
    "memory.nbd", "memory.service", "memory.spill", "memory.array",
    "torch", "elastic", "tune", "client", "console", "web", "loadgen", "cli",
)  # fmt: skip
"""The rooms from the ground up: each may import what stands before it, and itself."""

LOOK_INTO_SERVICES = {
    "client": "the ranks and nodes of a gang",
    "console": "the names of placement policies, for --policy",
    "loadgen": "pure parts of services, which the simulator drives",
    "cli": "configurations, names of policies, a gang's ranks, what the simulator imports",
}
"""Rooms above the services that may import of them, and what. Everything else meets a service on
the bus."""

SIMULATORS = {"gpu", "pool", "memory"}

PURE_BANNED = {
    "asyncio", "ctypes", "fcntl", "logging", "mmap", "nats", "os", "pathlib", "psutil", "random",
    "selectors", "shutil", "socket", "structlog", "subprocess", "threading", "time",
}  # fmt: skip
"""Modules that do I/O, read a clock or draw. `from random import Random` names a type: whoever
calls passes the source."""

SHELLS = {
    "aggregator": {"checkpoints", "executor", "fold_threads", "migration", "orders", "plane",
                   "regions", "session"},
    "controller": set(),
    "master": {"fact_stream", "hook"},
    "profiler": set(),
    "slabd": {"monitor", "sessions", "slabs"},
    "worker": {"accounts", "becoming", "code", "containment", "environment", "gauges", "gone",
               "gpus", "logreader", "permit_server", "ports", "processes", "pruning", "ranklog",
               "relay", "stacks", "terminal_program", "terminals", "tokens", "traffic",
               "traffic_program", "venvs", "warm", "warm_program"},
}  # fmt: skip
"""Modules of each service that do I/O, beside its `shell` and `__main__`. All others are pure."""


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


def room(path: Path) -> str:
    """Return the name in FLOORS of the room that the module is in; empty for the package itself."""
    parts = path.relative_to(ROOT).parts
    return "" if parts[:2] == ("src", "slackwater") and len(parts) == 3 else room_of(dotted(path))


def dotted(path: Path) -> list[str]:
    """Return the words of the module's name below `slackwater`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return list(parts[2:] if parts[0] == "src" else parts)


def room_of(words: list[str]) -> str:
    for name in (".".join(words[:2]), words[0]):
        if name in FLOORS:
            return name
    return ""


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


@cache
def comments(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and text of each comment; neighbouring lines of comment alone are one."""
    found: list[tuple[int, str]] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#:! ").rstrip("- ")
        alone = token.line.lstrip().startswith("#")
        if alone and last == line - 1:
            first, before = found[-1]
            found[-1] = (first, f"{before} {text}")
        else:
            found.append((line, text))
        last = line if alone else 0
    return tuple(found)


def python_files() -> Iterator[Path]:
    yield from (*modules(), *sorted((ROOT / "tests").rglob("*.py")))


def obscure_start(word: str) -> bool:
    return word.startswith("...") or word.rstrip(",:;") in OBSCURE_STARTS


def test_a_handler_of_every_exception_says_why() -> None:
    """A comment on the line or below it names what else may be raised, or what becomes of it."""
    silent = []
    for path in modules():
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            caught = re.search(r"except Exception(?: as \w+)?:(.*)$", line)
            below = lines[number].strip() if number < len(lines) else ""
            if caught and "#" not in caught[1] and not below.startswith("#"):
                silent.append(f"{name(path)}:{number}")
    assert not silent, f"name the exceptions, or say why all of them: {silent}"


def test_docstrings_and_comments_begin_with_a_verb_or_a_name() -> None:
    """`Of the job: ...` is read twice, `The job's ...` once. Comments are held to it, too."""
    obscure = [
        f"{name(path)}:{line}"
        for path in python_files()
        for line, text in (*docstrings(path), *comments(path))
        if text.split()[:1] and obscure_start(text.split()[0])
    ]
    assert not obscure, f"say it with a verb or a name: {obscure}"


def leading_text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
    return ""


def test_help_and_errors_begin_with_a_verb_or_a_name() -> None:
    """Help texts of options and commands, texts of raised errors, reasons of refusals. Commands'
    own help is a docstring, see above."""
    said = {"help", "short_help", "epilog", "reason", "why", "remedy"}
    obscure = []
    for path in modules():
        for node in ast.walk(tree(path)):
            texts: list[ast.expr] = []
            if isinstance(node, ast.Call):
                texts += [keyword.value for keyword in node.keywords if keyword.arg in said]
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts += node.exc.args
            obscure += [
                f"{name(path)}:{text.lineno} {words[0]}"
                for text in texts
                if (words := leading_text(text).split()) and obscure_start(words[0])
            ]
    assert not obscure, f"say it with a verb or a name: {obscure}"


LIST_ITEM = re.compile(r"\s*(?:[-*]|\d+\.|>)\s+")


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """Line and first words of each paragraph and list item. Headings may ask a question."""
    code, before = False, ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        item = LIST_ITEM.match(line)
        if line.lstrip().startswith("```"):
            code = not code
        begins = item or not before.strip() or before.startswith("#")
        if (
            begins
            and not code
            and line.strip()
            and not line.lstrip().startswith(("#", "|", "`" * 3))
        ):
            yield number, line[item.end() :] if item else line
        before = line


def test_guides_begin_paragraphs_with_a_verb_or_a_name() -> None:
    obscure = [
        f"{name(page)}:{line} {text[:40]}"
        for page in sorted((ROOT / "docs" / "guide").glob("*.md"))
        for line, text in paragraphs(page)
        if (words := text.split()) and obscure_start(words[0].strip("*_"))
    ]
    assert not obscure, f"say it with a verb or a name: {obscure}"


IS_NO = re.compile(
    r"(?<!\bthere )\b(?:is|are|was|were) no "
    r"(?!(?:longer|more|less|fewer|better|worse|one|such|later|larger|smaller|slower|faster)\b)"
)
# "There is no Y" says something else, and is fine.


def test_nobody_says_is_no() -> None:
    texts = [
        (path, node.lineno, node.value)
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    texts += [(path, line, text) for path in python_files() for line, text in comments(path)]
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    texts += [(page, 1, page.read_text()) for page in pages if page.name != "CHANGELOG.md"]
    found = [
        f"{name(path)}:{line} says {hit[0]!r}"
        for path, line, text in texts
        for hit in IS_NO.finditer(" ".join(text.split()).lower())
    ]
    assert not found, f"say `is not a`: {found}"


FORMER_MODULES = {
    "ahead", "announcing", "asking", "asking_end", "assigning", "attached", "attaching",
    "attending", "compiling", "configuring", "detached", "dialing", "divided", "drained",
    "draining", "edges", "ending", "face", "factkeeper", "filling", "gpu_double", "holding",
    "idling", "interrupting", "keeper", "lane_ends", "leaving", "listening", "missing",
    "moving", "naming", "natsserver", "placing", "queued", "repeating", "restarting", "roads",
    "rooms", "running", "scraping", "sdnotify", "served", "shelf", "simloop", "stocking", "team",
    "told", "turns", "watching", "wishes", "within",
}  # fmt: skip
FORMER_NAMES = {
    "Holding": "FileLock", "AskingEnd": "InitiatorEnd", "Asker": "TransferOwner",
    "rang": "on_doorbell", "partly": "on_partial_push", "hopeful": "may_complete",
    "DoubleKernels": "FakeKernels", "DoubleDevice": "FakeDevice",
    "Wish": "PendingAssignment", "wish": "pending", "went": "forwarding_of",
    "PlanTurns": "SlotPlan", "JobTurns": "JobSlotPlan", "Turns": "TaskIntervals",
    "SetTurns": "SetSlotPlan", "CyclicTurns": "CyclicRule", "DeadlineTurns": "DeadlineRule",
    "tenant_levels": "tenant_gauges", "Way": "LinkDirection", "Travelling": "TimedTransfer",
    "Noticed": "WorkWithCallback", "Roomy": "Reserving", "Rooms": "Reservations",
    "Door": "Greeter", "Felt": "LossRecord", "Touched": "PagedArray",
}  # fmt: skip
"""Private metaphors, and the plain words that took their places."""
FORMER_FUNCTIONS = {
    "services/aggregator/session.py": {"left"},
    "services/controller/assignment.py": {"want", "derive"},
    "services/controller/drains.py": {"left"},
    "services/controller/room.py": {"never", "short"},
    "services/controller/slot_plans.py": {"tell", "told"},
    "services/controller/state.py": {"gone"},
    "services/master/dispatch.py": {"asked"},
    "services/master/lifecycle.py": {"left", "given"},
    "services/master/missing_ranks.py": {"asked"},
    "services/master/progress.py": {"told"},
    "services/master/rank_restarts.py": {"rested"},
    "services/master/state.py": {"seen"},
    "services/worker/processes.py": {"Keep"},
    "src/slackwater/agent/worker_bucket.py": {"Cell", "cells_of", "lent"},
    "common/shell/service.py": {"gauges"},
    "common/shell/definition.py": {"levels"},
    "loadgen/replay/display.py": {"doing"},
    "loadgen/replay/measures.py": {"beside"},
    "loadgen/reproduce/cruise.py": {"seen"},
}
"""Names that mean something elsewhere, but said nothing in these modules."""


def test_former_names_stay_away() -> None:
    paths = (*modules(), *(ROOT / "tests").rglob("*.py"))
    found = [f"{name(path)}: another name" for path in paths if path.stem in FORMER_MODULES]
    for path in paths:
        for node in ast.walk(tree(path)):
            match node:
                case ast.ClassDef(name=word) | ast.FunctionDef(name=word):
                    pass
                case ast.AsyncFunctionDef(name=word) | ast.Attribute(attr=word):
                    pass
                case _:
                    continue
            if word in FORMER_NAMES:
                found.append(f"{name(path)}:{node.lineno} {word} is {FORMER_NAMES[word]} now")
    for module, former in FORMER_FUNCTIONS.items():
        for node in ast.walk(tree(ROOT / module)):
            match node:
                case ast.ClassDef(name=word) | ast.FunctionDef(name=word):
                    pass
                case ast.AnnAssign(target=ast.Name(id=word) | ast.Attribute(attr=word)):
                    pass
                case _:
                    continue
            if word in former:
                found.append(f"{module}:{node.lineno} {word} had another name")
    assert not found, found


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
    assert long == set(LONG_MODULES), f"over {MODULE_LINES_MAX} lines: {long ^ set(LONG_MODULES)}"
    assert all(len(why) > 20 for why in LONG_MODULES.values())


def test_every_module_has_a_room() -> None:
    top = {"schemas", "common", "services", "loadgen", "src"}
    homeless = [
        name(path)
        for path in modules()
        if path.relative_to(ROOT).parts[0] in top and path.name != "__init__.py" and not room(path)
    ]
    assert not homeless, homeless


def test_dependencies_point_down() -> None:
    """No room imports one that stands above it: the drawing has no circle of rooms."""
    wrong = []
    for path in modules():
        mine = room(path)
        for imported, line in imports(path) if mine else ():
            words = imported.split(".")
            if words[0] != "slackwater" or len(words) < 2:
                continue
            target = {"Agent": "agent"}.get(words[1]) or room_of(words[1:])
            if not target or target == mine:
                continue
            allowed = FLOORS.index(target) < FLOORS.index(mine)
            if target == "services":
                allowed = mine in LOOK_INTO_SERVICES
            if not allowed:
                wrong.append(f"{name(path)}:{line} imports {imported}")
    assert not wrong, wrong


def test_folders_are_imported_through_the_package_alone() -> None:
    """`import services` would find the folder from the project's root, as a second package whose
    classes equal nothing."""
    for folder in ("schemas", "common", "services", "loadgen"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import {folder}"],
            cwd=ROOT.parent, capture_output=True, text=True,
        )  # fmt: skip
        assert "ModuleNotFoundError" in done.stderr, f"import {folder} works: {done.stderr}"
    wrong = [
        f"{name(path)}:{line} imports {imported}"
        for path in (*modules(), *(ROOT / "tests").rglob("*.py"))
        for imported, line in imports(path)
        if imported.split(".")[0] in {"schemas", "common", "services", "loadgen"}
    ]
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


def is_pure(path: Path) -> bool:
    """Say whether the module decides only: every module of a service that is not listed as shell,
    and every core elsewhere."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "services":
        return path.name == "core.py"
    return len(parts) > 2 and parts[2] not in {"shell", "__main__"} | SHELLS[parts[1]]


def test_the_simulator_imports_only_pure_parts_of_services() -> None:
    """All but `control`, whose subject is the shells: it runs them in virtual time."""
    wrong = []
    for path in modules():
        simulator = name(path).startswith("loadgen/simulator")
        if not simulator or name(path).startswith("loadgen/simulator/control/"):
            continue
        for imported, line in imports(path):
            words = imported.split(".")
            service = words[:2] == ["slackwater", "services"]
            if service and words[3] in {"shell", *SHELLS[words[2]]}:
                wrong.append(f"{name(path)}:{line} imports {imported}")
    assert not wrong, wrong


def test_the_simulators_know_neither_one_another_nor_their_commands() -> None:
    """They share the top of `loadgen/simulator`, and what is below; `loadgen/cli` joins them."""
    wrong = []
    for path in modules():
        words = dotted(path)
        if words[0] != "loadgen" or words[1] == "cli":
            continue
        own = words[2] if words[1] == "simulator" and len(words) > 3 else ""
        for imported, line in imports(path):
            found = imported.split(".")[1:]
            commands = found[:2] == ["loadgen", "cli"]
            other = found[:2] == ["loadgen", "simulator"] and found[2] in SIMULATORS - {own}
            if commands or (other and words[1] == "simulator"):
                wrong.append(f"{name(path)}:{line} imports {imported}")
    assert not wrong, wrong


def test_services_are_pure_but_for_their_shells() -> None:
    wrong = [
        f"{name(path)}:{line} imports {imported}"
        for path in modules()
        if is_pure(path)
        for imported, line in imports(path)
        if imported.split(".")[0] in PURE_BANNED and imported != "random.Random"
    ]
    assert not wrong, wrong


def test_listed_shells_do_input_or_output() -> None:
    """A module that became pure leaves the list."""
    idle = [
        f"{service}/{module}"
        for service, listed in SHELLS.items()
        for module in listed
        if not any(
            imported.split(".")[0] in PURE_BANNED and imported != "random.Random"
            for imported, _ in imports(ROOT / "services" / service / f"{module}.py")
        )
    ]
    assert not idle, idle


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


CITED = re.compile(r"(?<![\w/.*{<-])((?:[\w.-]+/)*[\w-]+\.(?:py|md)|ADR \d+)(?![\w/(])")
"""A file of ours as comments, docstrings and pages name it: by its path from the root, or below a
folder, or its name alone."""

OTHERS_FILES = {
    "train.py", "run_sim.py",
    "evaluate.py", "train_v2.py",
    "examples/pytorch/mnist/mnist.py", "mnist.py", "torchrun/ddp_train.py", "ddp_train.py",
    "mnist/main.py",
}  # fmt: skip
"""Users' programs in examples, files of the artifacts that we compare with, public scripts."""


@cache
def names_of_files() -> frozenset[str]:
    """Return every tail of every path of ours: its name alone, that and its folder, and so on."""
    paths = [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    paths += [*ROOT.glob("*.md"), *(ROOT / "deploy").rglob("*.[mp][dy]")]
    paths += (ROOT / "loadgen").rglob("*.md")
    parts = [path.relative_to(ROOT).parts for path in paths]
    return frozenset("/".join(one[at:]) for one in parts for at in range(len(one)))


def test_every_file_that_is_cited_exists() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    texts = [(page, 1, page.read_text()) for page in pages if page.name != "CHANGELOG.md"]
    texts += [
        (path, line, text)
        for path in (*modules(), *(ROOT / "tests").rglob("*.py"))
        for line, text in docstrings(path)
    ]
    decisions = {int(path.name[:4]) for path in (ROOT / "docs/adr").glob("0*.md")}
    missing = []
    for path, line, text in texts:
        for found in CITED.findall(text):
            if found.startswith("ADR "):
                known = int(found[4:]) in decisions
            else:
                known = found.replace("../", "") in names_of_files() | OTHERS_FILES
            if not known:
                missing.append(f"{name(path)}:{line} cites {found}")
    assert not missing, missing


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing, f"{page}: {missing}"
