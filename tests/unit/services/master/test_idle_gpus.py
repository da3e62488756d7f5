"""GPUs of running jobs that compute nothing are told of, once, until they compute again."""

from typing import Any

from tests.unit.services.master.test_gpu_dispatch import GpuHarness

from slackwater.common.base.effects import Publish
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.job_events import JobEvent

LIMIT_S = 600.0


class Watched(GpuHarness):
    """Job `a` runs on the four GPUs of two nodes."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.told: list[str] = []
        self.submit("a", 4)
        for node in ("n1", "n2"):
            self.confirm(f"start@{node}/a")

    def pass_s(self, seconds: float, idle: tuple[str, ...], idle_s: float = 0.0) -> None:
        """Let time pass by steps of ten seconds, while these GPUs are idle; for `idle_s` already at
        its begin."""
        for step in range(round(seconds / 10.0)):
            for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
                gpus = tuple(
                    Gpu(
                        index=n, id=f"{node}/{n}", type="fake",
                        idle_s=idle_s + step * 10.0 if f"{node}/{n}" in idle else 0.0,
                    )
                    for n in range(2)
                )  # fmt: skip
                self.see(
                    WorkerHeartbeat(
                        service="worker", id=node, incarnation=0, at_s=self.now_s,
                        node=NodeId(node), slots=8, gpus=gpus,
                        running=tuple((JobId("a"), rank) for rank in ranks),
                    )
                )  # fmt: skip
            self.told += [
                effect.message.reason
                for effect in self.tick(10.0)
                if isinstance(effect, Publish)
                and isinstance(effect.message, JobEvent)
                and effect.message.fact == "gpus-idle"
            ]


def test_it_is_told_once_and_stands_beside_the_job() -> None:
    watched = Watched()
    watched.pass_s(LIMIT_S - 20.0, ("n1/1", "n2/0"))
    assert watched.told == []
    watched.pass_s(100.0, ("n1/1", "n2/0"), LIMIT_S)
    (told,) = watched.told
    assert told.startswith("GPU 1 of n1, GPU 0 of n2 have computed nothing for 10 min: ")
    assert watched.why("a").startswith("GPU 1 of n1, GPU 0 of n2 have computed nothing for 1")


def test_one_that_computes_again_is_told_of_anew() -> None:
    watched = Watched()
    watched.pass_s(LIMIT_S, ())
    watched.pass_s(20.0, ("n1/0",), LIMIT_S)
    watched.pass_s(20.0, ())
    assert watched.why("a") == ""
    watched.pass_s(20.0, ("n1/0",), LIMIT_S)
    assert len(watched.told) == 2


def test_idleness_before_the_job_began_does_not_count() -> None:
    watched = Watched()
    watched.pass_s(LIMIT_S - 20.0, ("n1/0",), 3600.0)
    assert watched.told == []


def test_zero_switches_it_off() -> None:
    watched = Watched(idle_gpu_s=0.0)
    watched.pass_s(2 * LIMIT_S, ("n1/0",), 3600.0)
    assert watched.told == []
