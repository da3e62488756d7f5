"""The lab's cluster, which all tests here use one after another, and what they measured."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import pytest
from tests.lab import machines
from tests.lab.lab import NAMES, Lab, Played, missing
from tests.lab.load import Load

MEASURED: Final = pytest.StashKey[list[str]]()
REFUSED: Final = pytest.StashKey[str]()
# The client library forgets its former connection to a server that ends it.
IGNORED: Final = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
Undergo = Callable[[str], AbstractContextManager[None]]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = []


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if why := config.stash.get(REFUSED, ""):
        terminalreporter.section("lab")
        terminalreporter.write_line(f"NOT RUN: the lab cannot run here: {why}")
    elif lines := config.stash[MEASURED]:
        terminalreporter.section("lab")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the end of the run."""
    return request.config.stash[MEASURED]


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The machines, bare at first; those of `python -m tests.lab up` are used as they are."""
    if why := missing():
        request.config.stash[REFUSED] = why
        if os.environ.get("SLACKWATER_LAB") == "required":
            pytest.fail(f"SLACKWATER_LAB=required, and the lab cannot run here: {why}")
        pytest.skip(f"the lab cannot run here: {why}")
    made = Lab()
    keep = made.up
    if not keep:
        made.start()
    yield made
    if not keep:
        machines.stop(made.machines)


@pytest.fixture(scope="session")
def deployed(lab: Lab, measured: list[str]) -> Played:
    """How site.yml ended on them; SLACKWATER_LAB=deployed: it was played before."""
    if os.environ.get("SLACKWATER_LAB") == "deployed":
        return Played({}, "", 0.0)
    played = lab.play("site.yml")
    measured.append(f"site.yml on three bare machines: {played.took_s / 60:.1f} min")
    return played


@pytest.fixture(scope="module")
def load(lab: Lab, deployed: Played) -> Iterator[Load]:
    with Load(lab) as submitting:
        yield submitting


@pytest.fixture
def undergo(lab: Lab, load: Load, measured: list[str]) -> Undergo:
    """A fault under load: what was acknowledged is there afterwards, and has run."""

    @contextmanager
    def around(name: str) -> Iterator[None]:
        load.accepts(60.0)
        began_s, refused = time.monotonic(), len(load.refusals)
        try:
            yield
        except BaseException as error:
            error.add_note("\n".join(lab.journal(name) for name in NAMES[:3]))
            raise
        load.accepts(120.0)
        said = f", said: {load.refusals[refused][:110]}" if len(load.refusals) > refused else ""
        measured.append(f"{name:<34} {load.gap_s(began_s):6.1f} s without a new job{said}")
        load.settled()

    return around
