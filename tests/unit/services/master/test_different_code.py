"""A gang whose nodes have the same path, and not the same code."""

import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness, started

from slackwater.common.base.effects import Answered, Persist, Request
from slackwater.schemas.job_requests import PauseJob, ResumeJob
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.workers import Prepared, PrepareWorkers


def prepared(*codes: str) -> list[object]:
    """Submit a job on two nodes, which answer with these digests."""
    harness = GpuHarness()
    harness.prepares = False
    return answered(harness, harness.submit("a", 4, program=("python", "train.py")), *codes)


def answered(harness: GpuHarness, effects: list[object], *codes: str) -> list[object]:
    """Answer what these effects ask nodes to prepare."""
    asked = [
        effect for effect in effects
        if isinstance(effect, Request) and isinstance(effect.message, PrepareWorkers)
    ]  # fmt: skip
    found: list[object] = []
    for request, code in zip(asked, codes, strict=True):
        found += harness.step(Answered(request.key, Prepared(host="n", port=1, code=code)))
    return found


def test_ranks_on_different_code_are_refused_with_both_digests() -> None:
    effects = prepared("a" * 64, "b" * 64)
    assert started(effects) == {}
    record = next(
        effect.record for effect in effects
        if isinstance(effect, Persist) and isinstance(effect.record, JobRecord)
    )  # fmt: skip
    assert record.state == "failed"
    for said in ("python train.py", "aaaaaaaaaaaa on n1", "bbbbbbbbbbbb on n2", "--workdir"):
        assert said in record.reason


@pytest.mark.parametrize("codes", [("a" * 64, "a" * 64), ("", "a" * 64), ("", "")])
def test_the_same_code_and_what_says_nothing_starts(codes: tuple[str, str]) -> None:
    """A service of an earlier version does not tell a digest."""
    assert set(started(prepared(*codes))) == {"n1 a", "n2 a"}


def test_new_code_on_all_nodes_starts_after_a_pause() -> None:
    """The digests of the attempt before count no more."""
    harness = GpuHarness()
    harness.prepares = False
    first = harness.submit("a", 4, program=("python", "train.py"))
    answered(harness, first, "a" * 64, "a" * 64)
    for node in ("n1", "n2"):
        harness.confirm(f"start@{node}/a")
    harness.ask(PauseJob(job="a"))
    for node in ("n1", "n2"):
        harness.confirm(f"stop@{node}/a")
    again = list(harness.ask(ResumeJob(job="a")))
    assert set(started(answered(harness, again, "b" * 64, "b" * 64))) == {"n1 a", "n2 a"}
