"""Failpoints: unarmed they do nothing, armed they kill at the hit they were told, and only known
names can be armed."""

import os
import signal
from typing import Any

import pytest

from slackwater.common.base import failpoints
from slackwater.common.base.errors import ConfigRejected, Unavailable


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Signals that would have been sent to this process; everything is disarmed afterwards."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append(signum))
    yield sent
    failpoints.arm("")


def test_every_service_has_every_point_of_the_shell() -> None:
    names = failpoints.names()
    assert len(names) == len(set(names))
    for service in failpoints.SERVICES:
        assert set(failpoints.of_shell(service)) <= set(names)
    assert "aggregator.fold.mid" in names
    assert len(names) >= 40


def test_the_third_hit_kills_and_no_other(kills: list[int]) -> None:
    failpoints.arm("master.persist.before=kill@3, controller.reply.after=stop@1")
    for _ in range(2):
        failpoints.failpoint("master.persist.before")
    assert kills == []
    failpoints.failpoint("master.persist.after")
    failpoints.failpoint("master.persist.before")
    assert kills == [signal.SIGKILL]
    failpoints.failpoint("master.persist.before")
    failpoints.failpoint("controller.reply.after")
    assert kills == [signal.SIGKILL, signal.SIGSTOP]


def test_a_random_hit_is_the_seeds(kills: list[int]) -> None:
    def hit(seed: int) -> int:
        failpoints.arm(f"master.persist.before=kill@random({seed})")
        kills.clear()
        for count in range(1, failpoints.RANDOM_HITS_MAX + 1):
            failpoints.failpoint("master.persist.before")
            if kills:
                return count
        raise AssertionError("it never killed")

    hits = [hit(seed) for seed in range(50)]
    assert hits == [hit(seed) for seed in range(50)]
    assert len(set(hits)) > 10


def test_nothing_is_armed_without_being_asked(kills: list[int]) -> None:
    failpoints.arm("")
    for name in failpoints.names():
        failpoints.failpoint(name)
    assert kills == []
    assert not failpoints.any_armed()


@pytest.mark.parametrize(
    "text", ["nobody.persist.before=kill@1", "master.persist.before", "master.persist.before=die@1"]
)
def test_what_cannot_be_armed_is_refused(text: str) -> None:
    with pytest.raises(ConfigRejected, match="SLACKWATER_FAILPOINTS"):
        failpoints.arm(text)
    failpoints.arm("")


def test_an_error_is_the_one_that_may_arise_there_and_comes_once(kills: list[int]) -> None:
    failpoints.arm("master.put.after=error@2, worker.start.before=error@1")
    failpoints.failpoint("master.put.after")
    with pytest.raises(Unavailable, match=r"failpoint master\.put\.after"):
        failpoints.failpoint("master.put.after")
    failpoints.failpoint("master.put.after")
    with pytest.raises(OSError, match=r"failpoint worker\.start\.before"):
        failpoints.failpoint("worker.start.before")
    assert kills == []


def test_a_delay_holds_the_process_for_that_long(
    kills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(failpoints.time, "sleep", slept_s.append)
    failpoints.arm("slabd.lend.before=delay(0.5)@2")
    for _ in range(3):
        failpoints.failpoint("slabd.lend.before")
    assert (slept_s, kills) == ([0.5], [])


def test_what_cannot_fail_by_itself_is_not_made_to() -> None:
    with pytest.raises(ConfigRejected, match=r"at master\.reply\.before"):
        failpoints.arm("master.reply.before=error@1")
    failpoints.arm("")
