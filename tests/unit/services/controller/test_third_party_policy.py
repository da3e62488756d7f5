"""A policy that somebody else installed is asked for wherever ours are."""

from pathlib import Path

import pytest
from tests.unit.services.controller.harness import Harness, Pool

from slackwater.common.base.codec import encode
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell.requester import decode_any
from slackwater.console.outcome import Usage
from slackwater.loadgen.cli.replay import policy_named
from slackwater.loadgen.cli.simulate_pool import settings_for, simulate_pool
from slackwater.loadgen.simulator.options import Options
from slackwater.schemas.base import Ok, Refused
from slackwater.schemas.job_requests import SubmitJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import PlaceJob
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.controller.policies import known_policies, load_policy

MODULE = '''
from slackwater.services.controller.policies.edf import Edf
from slackwater.services.controller.policies.view import TaskIntervals


class Twice(Edf):
    """By deadlines; every task comes as often as the job iterates, twice."""

    prefers = {"pack_alone": True}

    def plans(self, view):
        return {
            id: TaskIntervals({job: every_s / 2 for job, every_s in turns.every_s.items()})
            for id, turns in super().plans(view).items()
        }


class Half:
    """Of another time: a policy had fewer parts then."""

    adapts, private, order = True, False, "arrival"

    def assign(self, view, job, memory):
        raise NotImplementedError
'''
POINTS = """[slackwater.placement_policies]
twice = somebodys_policy:Twice
half = somebodys_policy:Half
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay out files as `pip install` does: a module, and its entry points."""
    (tmp_path / "somebodys_policy.py").write_text(MODULE)
    info = tmp_path / "somebodys_policy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-policy\nVersion: 1\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))


def asked(id: str, policy: str | None) -> PlaceJob:
    tensors = tuple(TensorSpec(name=f"t{n}", shape=(262_144,)) for n in range(2))
    return PlaceJob(spec=JobSpec(id=id, servers=2, workers=2, aggregation=policy), tensors=tensors)


def test_it_is_listed_with_ours_and_a_submission_may_name_it() -> None:
    assert {"edf", "cyclic", "static", "twice"} <= set(known_policies())
    message = SubmitJob(spec=JobSpec(id="j", aggregation="twice"))
    decoded = decode_any(encode(message))
    assert isinstance(decoded, SubmitJob)
    assert decoded.spec.aggregation == "twice"


def test_a_job_and_a_cluster_may_have_it() -> None:
    harness = Harness(Pool(6), policy="twice")
    assert harness.ask(asked("j", None)) == Ok()
    assert harness.ask(asked("k", "twice")) == Ok()
    assert harness.ask(asked("other", "cyclic")) == Ok()
    assert harness.stored["k"].phase == "profiling"
    for id in ("j", "k"):
        harness.profile(id, [0.002, 0.002])
        harness.migrated(id)
    harness.tick()
    state = harness.core.state
    every_s = {turn.job: turn.every_s for plan in state.turns.values() for turn in plan.jobs}
    assert every_s == {"j": 0.5, "k": 0.5}, "what its executor is told is the policy's own"


def test_a_name_that_nobody_registered_is_refused_with_those_that_are_known() -> None:
    harness = Harness(Pool(4))
    answer = harness.ask(asked("j", "twise"))
    assert isinstance(answer, Refused)
    assert answer.retry_after_s == 0.0
    assert "'twise'" in answer.reason
    assert "twice" in answer.reason
    assert "j" not in harness.stored


def test_a_class_that_lacks_parts_is_named_with_them() -> None:
    with pytest.raises(ConfigRejected, match=r"half.* has no prefers, free, explains, plans"):
        load_policy("half")


def test_a_job_whose_policy_is_gone_goes_on_by_the_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(Pool(6), policy="edf")
    assert harness.ask(asked("k", "twice")) == Ok()
    harness.profile("k", [0.002, 0.002])
    harness.migrated("k")
    (tmp_path / "somebodys_policy-1.dist-info" / "entry_points.txt").write_text("")
    harness.restart()
    state = harness.core.state
    assert state.policy_name(state.jobs[harness.stored["k"].plan.job]) == "edf"
    harness.pass_time(3)
    assert harness.stored["k"].phase == "steady"


def test_replay_and_simulate_take_it(tmp_path: Path) -> None:
    assert policy_named("twice") == "twice"
    with pytest.raises(Usage, match=r"choose one of .*twice"):
        policy_named("twise")
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,submit_s,gpus,duration_s\na,0,2,4000\nb,10,2,4000\n")
    options = Options(trace=str(trace), policies=("twice", "edf"), nodes=4)
    assert settings_for(options, "twice").pack_alone, "what it prefers"
    twice, edf = (summary for _, _, summary in simulate_pool(options, processes=1, progress=False))
    assert twice.policy == "twice"
    assert 0.0 < twice.saved < 1.0
    assert edf.policy == "edf"
