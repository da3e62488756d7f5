"""When a job's slots are used: what the utilisation of its own servers is read from."""

from itertools import pairwise

import pytest

from slackwater.loadgen.simulator.pool.slots import SlotJob, SlotRun, SlotTask

SHARES = {"s0": 0.5, "s1": 0.5}


def test_the_spans_of_a_job_alone_are_its_updates_and_no_two_overlap_on_a_server() -> None:
    """0.1 and 0.2 CPU seconds on half a core each, once an iteration."""
    job = SlotJob("j", 1.0, (SlotTask("s0", 0.1, 0.0), SlotTask("s1", 0.2, 0.5)))
    run = SlotRun([job], SHARES, "arrival", until_s=10.0)
    run.spans = []
    iterations = len(run.iterations_s()["j"])
    for server, slot_s in (("s0", 0.2), ("s1", 0.4)):
        spans = [(begin, end) for name, begin, end in run.spans if name == server]
        assert len(spans) >= iterations
        assert [end - begin for begin, end in spans] == pytest.approx([slot_s] * len(spans))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_nothing_is_kept_unless_asked_for() -> None:
    run = SlotRun([SlotJob("j", 1.0, (SlotTask("s0", 0.1, 0.0),))], SHARES, "arrival", 5.0)
    run.iterations_s()
    assert run.spans is None
