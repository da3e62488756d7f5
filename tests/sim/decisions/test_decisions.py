"""The simulator decides as it did when digests.json was written, to the byte of its event logs.

A change that means to decide otherwise rewrites the digests in a commit of its own and says why:
`python -m tests.sim.decisions.record --rewrite CASE...`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT, public_traces
from tests.sim.decisions.cases import CASES
from tests.sim.decisions.inputs import write_inputs
from tests.sim.decisions.record import MARK, arithmetic, differences, read_digests, record

from slackwater.services.master.scheduling import registry

RECORDED = [
    pytest.param(name, marks=pytest.mark.traces) if case.recorded else name
    for name, case in CASES.items()
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("name", RECORDED)
def test_event_logs_are_the_recorded_ones(name: str, inputs: Path, tmp_path: Path) -> None:
    """Longest are those with up to seventeen policies: two seconds of CPU or so."""
    case, digests = CASES[name], read_digests()
    if case.recorded and not public_traces().is_dir():
        pytest.skip(f"the trace folder is absent ({public_traces()}); set SLACKWATER_TRACES")
    if case.fitted and arithmetic() != digests["arithmetic"]:
        pytest.skip("this machine rounds otherwise than the one that recorded fitted models")
    now = record(name, inputs, tmp_path)
    assert differences(name, digests["cases"][name], now, tmp_path) == []


def test_every_policy_has_a_recorded_case_and_every_case_a_record() -> None:
    simulated = {policy for case in CASES.values() for policy in case.policies}
    assert simulated >= set(registry.BUILT_IN)
    assert read_digests()["cases"].keys() == CASES.keys()


def test_the_first_difference_is_named_with_its_second(inputs: Path, tmp_path: Path) -> None:
    now = record("interleaved", inputs, tmp_path)
    was = {**now, "runs": {policy: dict(run) for policy, run in now["runs"].items()}}
    run = was["runs"]["isolated"]
    run["events"], run["preemptions"] = "0" * 64, 41
    run["marks"] = run["marks"][: 2 * MARK] + "z" * MARK + run["marks"][3 * MARK :]
    (found,) = differences("interleaved", was, now, tmp_path)
    assert "isolated: differs first in slice 2, from " in found
    assert "preemptions 41 -> " in found


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_a_process_with_other_hashes_records_the_same(seed: str) -> None:
    """Three seconds of CPU: a process of its own, in which sets of texts have another order."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.decisions.record", "colocated-three", "quotas-on-types"],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
