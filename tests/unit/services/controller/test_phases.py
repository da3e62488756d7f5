"""Jobs and aggregators of a cluster move by their tables; what broke one is told with its story."""

import pytest
from tests.unit.services.controller.harness import Harness, Pool

from slackwater.common.base.transitions import InvalidTransition
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.invariants import check_invariants
from slackwater.services.controller.phases import PHASES, PRESENCES
from slackwater.services.controller.state import Aggregator


def test_a_phase_that_cannot_follow_tells_the_story_and_stores_nothing() -> None:
    harness = Harness(Pool(3))
    harness.place("j1", [0.02, 0.02])
    state = harness.core.state
    job = state.jobs[JobId("j1")]
    record, out = job.record, list(state.out)
    assert record.phase == "steady"
    with pytest.raises(InvalidTransition) as caught:
        state.change(job, phase="waiting")
    text = str(caught.value)
    assert text.startswith("job j1: steady -> waiting (it is stored) is impossible; before: ")
    assert "waiting (it is placed or found), hosting (it is stored), profiling" in text
    assert job.record is record
    assert state.out == out


def test_an_aggregator_that_was_given_up_is_not_merely_silent() -> None:
    entry = Aggregator(AggregatorId("a1"), seen_s=0.0)
    entry.become("alive", "it is heard")
    entry.become("given_up", "it will not come back")
    with pytest.raises(InvalidTransition, match=r"aggregator a1: given_up -> silent .*alive \("):
        entry.become("silent", "its heartbeats stopped")
    entry.become("alive", "it is heard")
    assert entry.alive
    assert not entry.given_up


def test_an_index_that_is_not_what_the_records_say_is_found() -> None:
    harness = Harness(Pool(3))
    harness.place("j1", [0.02])
    harness.core.state.index.living.clear()
    with pytest.raises(AssertionError, match=r"'living': \(\[\], \['j1'\]\)"):
        check_invariants(harness.core.state)


@pytest.mark.parametrize("table", [PHASES, PRESENCES])
def test_every_state_can_be_reached(table: dict[str, frozenset[str]]) -> None:
    reached = {next(iter(table))}
    for _ in table:
        reached |= {after for state in reached for after in table[state]}
    assert reached == table.keys()
