"""A gang whose nodes have the same path, and not the same code."""

import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness, started

from slackwater.common.base.effects import Answered, Persist, Request
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.workers import Prepared, PrepareWorkers


def prepared(*codes: str) -> list[object]:
    """Submit a job on two nodes, which answer with these digests."""
    harness = GpuHarness()
    harness.prepares = False
    asked = [
        effect for effect in harness.submit("a", 4, program=("python", "train.py"))
        if isinstance(effect, Request) and isinstance(effect.message, PrepareWorkers)
    ]  # fmt: skip
    effects: list[object] = []
    for request, code in zip(asked, codes, strict=True):
        effects += harness.step(Answered(request.key, Prepared(host="n", port=1, code=code)))
    return effects


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
