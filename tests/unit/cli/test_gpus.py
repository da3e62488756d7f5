"""GPUs in options and tables: as they are written, and as they are shown."""

import pytest
from tests.unit.cli.jobs import NOW_S, listed

from slackwater.cli.commands import app
from slackwater.cli.job import described
from slackwater.cli.jobs import Job, table
from slackwater.cli.nodes import node_table
from slackwater.common.embedded import ClusterOptions
from slackwater.common.embedded.cluster import service_stages
from slackwater.console.gpus import batch_bounds, gpu_types
from slackwater.console.outcome import Usage
from slackwater.console.program import answered
from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import NodeInfo, WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.worker.config import WorkerConfig, configured_gpus

SPEC = JobSpec(
    id="k1", gpus=6, workers=6, gpus_min=2, gpus_max=8, adaptive=True, priority=3, cores=2.0,
    gpu_types={"V100": 1.0, "T4": 0.5}, batch_size=128, batch_max=4096, memory_bytes=2**33,
)  # fmt: skip
HELD = ((NodeId("n1"), 4), (NodeId("n2"), 2))


def test_types_have_a_speed_of_1_unless_one_is_given() -> None:
    assert gpu_types(["V100", "T4=0.5", "A=B=2"]) == {"V100": 1.0, "T4": 0.5, "A=B": 2.0}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["V100=x"], "'x' is not a number above 0"),
        (["V100=0"], "'0' is not a number above 0"),
        (["V100=nan"], "'nan' is not a number above 0"),
        (["=2"], "give a name of 1 to 64 characters"),
        (["V100", "V100=2"], "V100 is given twice; give each type once"),
    ],
)
def test_a_type_that_cannot_be_understood_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(Usage, match=said):
        gpu_types(texts)


def test_a_batch_is_a_size_or_bounds_of_which_it_begins_with_the_lower() -> None:
    assert batch_bounds("128") == {"batch_size": 128, "batch_min": 0, "batch_max": 0}
    fixed = {"batch_size": 128, "batch_min": 0, "batch_max": 0, "batch": "fixed"}
    assert batch_bounds("128:fixed") == fixed
    assert batch_bounds("128:4096") == {"batch_size": 128, "batch_min": 128, "batch_max": 4096}
    for text in ("", "0", "-1", "8:", "x", "8:9:10"):
        with pytest.raises(Usage, match="write a size such as 128"):
            batch_bounds(text)


def test_a_job_shows_its_gpus_and_where_they_are() -> None:
    running = JobRecord(spec=SPEC, state="running", node=NodeId("n1"), allocation=HELD, attempt=2,
                        reallocations=2, preemptions=1, started_s=NOW_S - 90)  # fmt: skip
    text = "\n".join(described(JobInfo(job=running), NOW_S))
    assert "GPUs:         6, from 2 to 8 while it runs, V100 or T4 (speed 0.5)" in text
    assert "Each process: 2 cores, 8.0 GiB of memory" in text
    assert "Batch:        128, from 128 to 4096" in text
    assert "Priority:     3" in text
    assert "Node:         n1:4,n2:2" in text
    assert "Attempt:      3, paused 1 time for others' sake" in text
    waiting = JobRecord(spec=SPEC, state="paused", since_s=NOW_S - 180, submitted_s=NOW_S - 999)
    assert "State:        paused, for 3m" in described(JobInfo(job=waiting), NOW_S)
    rows = table(listed(Job(running, None), Job(waiting, None)), wide=True, width=None)
    assert "6/6" in rows[1].split()
    assert "n1:4,n2:2" in rows[1].split()
    assert "0/6" in rows[2].split()


def test_nodes_show_gpus_by_type_and_faults() -> None:
    gpus = [Gpu(index=n, id=f"n1/{n}", type="V100" if n < 2 else "T4") for n in range(3)]
    gpus.append(Gpu(index=3, id="n1/3", type="T4", fault="uncorrectable memory error"))
    beat = WorkerHeartbeat(service="worker", id="n1", incarnation=1, at_s=1.0, node=NodeId("n1"),
                           slots=8, gpus=tuple(gpus), cores=4.0, memory_bytes=2**33,
                           rack="r1")  # fmt: skip
    info = NodeInfo(alive=True, heartbeat=beat, slots_used=3, gpus_used=("n1/0", "n1/2"), jobs=2)
    heads, row = node_table((info,), None)
    assert heads.split() == [
        "NODE", "STATE", "GPUS", "SLOTS", "JOBS", "CORES", "MEMORY", "RACK", "FAULT",
    ]  # fmt: skip
    assert "V100 1/2, T4 1/2  3/8    2     4      8.0 GiB  r1    GPU 3: uncorrectable" in row


def test_up_starts_nodes_with_the_gpus_that_it_is_told() -> None:
    options = ClusterOptions(aggregators=1, controllers=1, nodes=3, gpus_per_node=2)
    workers = [each for each in service_stages(options, 1.0, "")[-1] if each[0] == "worker"]
    assert [id for _, id, _ in workers] == ["w1", "w2", "w3"]
    assert all(fields == {"gpus": 2, "gpu_type": "fake"} for _, _, fields in workers)
    alone = service_stages(ClusterOptions(aggregators=1, controllers=1), 1.0, "")[-1]
    assert alone == [("worker", "w1", {})]


def test_configured_gpus_have_ids_that_no_other_node_has() -> None:
    gpus = configured_gpus(WorkerConfig(gpus=2, gpu_type="V100"), NodeId("n1"))
    assert [(gpu.index, gpu.id, gpu.type) for gpu in gpus] == [
        (0, "n1/0", "V100"), (1, "n1/1", "V100"),
    ]  # fmt: skip
    assert configured_gpus(WorkerConfig(), NodeId("n1")) == ()


def test_up_names_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(app, ["up", "--name", "nowhere", "--device", "gpu0"], "slackwater") == 78
    assert "device 'gpu0' is unknown: give one of" in capsys.readouterr().err
