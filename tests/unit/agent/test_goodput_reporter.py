"""A program's reporter learns, tunes, keeps and refuses; nobody listens."""

from pathlib import Path

import pytest
from tests.waiting import eventually

from slackwater import Agent, BatchLimits, GoodputReporter
from slackwater.agent.goodput import Placement, placement_of
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.domains.models.shared_throughput import SharedThroughput

LIMITS = BatchLimits(initial=32, total_max=1024, per_gpu_max=128)


@pytest.fixture(autouse=True)
def nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs on two nodes, and no job."""
    for name in ("JOB", "RANK", "WORKERS", "URL"):
        monkeypatch.delenv(f"SLACKWATER_{name}", raising=False)
    monkeypatch.setenv("SLACKWATER_ATTEMPT", "3")
    monkeypatch.setenv("SLACKWATER_GPUS", "n1:1,n2:1")


def train(reporter: GoodputReporter) -> None:
    """See an iteration of 32 examples a GPU whose gradients are mostly noise."""
    reporter.saw_iteration(0.1, per_gpu=16, grad_s=0.08)
    reporter.saw_replicas(200.0, 101.0, 16, 32)


def test_a_program_tunes_its_batch_by_what_it_measured_and_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    state = tmp_path / "checkpoint" / "goodput"
    with GoodputReporter(LIMITS, state=state, report_s=0.02) as reporter:
        assert reporter.placement == Placement(attempt=3, nodes=2, gpus=2)
        first = reporter.batch_split()
        assert first == (16, 0)
        assert reporter.learning_rate_scale(256) == pytest.approx(1.0)
        train(reporter)
        tuned = eventually(
            lambda: split if (split := reporter.batch_split()) != first else None, "it tunes"
        )
        assert tuned.per_gpu > 16, "noise makes larger batches worth their time"
        assert reporter.learning_rate_scale(256) > 1.0
        assert reporter.reports == 0
    again = GoodputReporter(LIMITS, state=state)
    assert again.batch_split() == tuned
    assert again.learning_rate_scale(256) > 1.0
    again.close()


def test_what_was_seen_just_before_the_end_is_kept(tmp_path: Path) -> None:
    state = tmp_path / "goodput"
    with GoodputReporter(LIMITS, state=state, report_s=600.0) as reporter:
        train(reporter)
    with GoodputReporter(LIMITS, state=state) as reporter:
        assert reporter.batch_split() != (16, 0)


def test_a_reporter_refuses_what_cannot_be(tmp_path: Path) -> None:
    with GoodputReporter(LIMITS) as reporter:
        for seconds in (0.0, -1.0, float("nan")):
            with pytest.raises(Rejected, match="was not measured"):
                reporter.saw_iteration(seconds, 16)
        with pytest.raises(Rejected, match="are not several"):
            reporter.saw_replicas(2.0, 1.0, 16, 16)
    with pytest.raises(Rejected, match="report_s is 0"):
        GoodputReporter(LIMITS, report_s=0)
    with pytest.raises(ConfigRejected, match="no learning-rate rule 'guess'"):
        GoodputReporter(LIMITS, lr_rule="guess")
    damaged = tmp_path / "goodput"
    damaged.write_text("{")
    with pytest.raises(Rejected, match="delete it, and it learns anew"):
        GoodputReporter(LIMITS, state=damaged)


def test_where_nobody_tells_the_gpus_each_worker_has_one() -> None:
    assert placement_of({}, 4) == Placement(attempt=0, nodes=1, gpus=4)
    assert placement_of({"SLACKWATER_GPUS": "a:2,b:6"}, 4) == Placement(0, 2, 8)
    with pytest.raises(Rejected, match="SLACKWATER_GPUS 'a:x'"):
        placement_of({"SLACKWATER_GPUS": "a:x"}, 1)


def test_a_batch_that_was_submitted_as_fixed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in (("64", 64), ("0", 32)):
        monkeypatch.setenv("SLACKWATER_BATCH", text)
        with GoodputReporter(LIMITS, report_s=600.0) as reporter:
            train(reporter)
            reporter._learn()
            per_gpu, accumulation = reporter.batch_split()
            assert 2 * per_gpu * (accumulation + 1) == size
    monkeypatch.setenv("SLACKWATER_BATCH", "many")
    with pytest.raises(Rejected, match="SLACKWATER_BATCH is 'many'"):
        GoodputReporter(LIMITS)


def test_a_reporter_that_has_an_agent_fits_the_throughput_of_aggregation() -> None:
    """Its gradient's bytes are known, and an Agent without a cluster is its own aggregator."""
    with (
        Agent(tensors={"w": (1000,)}) as agent,
        GoodputReporter(LIMITS, agent=agent, report_s=0.02) as reporter,
    ):
        train(reporter)
        model = eventually(lambda: reporter._agent.model, "it fits")
        assert isinstance(model.throughput, SharedThroughput)
        assert model.throughput.carried.nbytes == 4000
        assert model.throughput.aggregators == 1
