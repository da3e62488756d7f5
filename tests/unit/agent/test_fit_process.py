"""A real child fits, answers once, is replaced when it dies, and ends with its parent."""

import os
import signal
from collections.abc import Iterator

import pytest
from tests.waiting import eventually

from slackwater.agent.fit_process import CHILDREN_MAX, FitProcess
from slackwater.common.domains.models.adaptive_batch import Wanted
from slackwater.common.domains.models.fitting import Observation, fit
from slackwater.common.domains.models.throughput import ThroughputParams

SEEN = tuple(Observation(1, 2, m, 0, 0.02 + 0.001 * m) for m in (8, 16, 32, 64))


@pytest.fixture
def process() -> Iterator[FitProcess]:
    found = FitProcess()
    found.start()
    yield found
    found.close()
    found.close()


def answered(process: FitProcess) -> ThroughputParams:
    return eventually(process.answer, "the fit")


def test_the_child_fits_as_this_process_would(process: FitProcess) -> None:
    assert process.answer() is None
    assert process.ask(Wanted(SEEN, None))
    assert not process.ask(Wanted(SEEN, None)), "one at a time"
    first = answered(process)
    assert first == fit(SEEN)
    assert process.answer() is None
    assert process.ask(Wanted(SEEN, first))
    assert answered(process) == fit(SEEN, first)


def test_a_child_that_was_killed_is_replaced_a_few_times() -> None:
    process = FitProcess()
    assert not process.ask(Wanted(SEEN, None)), "none was started"
    process.start()
    for left in range(CHILDREN_MAX - 1, -1, -1):
        assert process.ask(Wanted(SEEN, None))
        answered(process)
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not process.ask(Wanted(SEEN, None)) or process.answer(), "it is seen")
        eventually(lambda: process.answer() is None and not process.waits, "it is given up")
        assert (process.pid is not None) == (left > 0)
    process.close()
