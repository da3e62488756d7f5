"""Jobs and aggregators as a master tells of them, for tests of what people see."""

from slackwater.cli.jobs import Job, Listed
from slackwater.schemas.base import AggregatorId, ClusterId, NodeId
from slackwater.schemas.cluster import AggregatorHeartbeat, AggregatorInfo, AggregatorRecord
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.progress import JobProgress

NOW_S = 1_800_000_000.0


def running(id: str, iteration: int = 7_210, speed: float = 6.1, loss: float = 0.03) -> Job:
    record = JobRecord(
        spec=JobSpec(id=id, model="vgg19", workers=2, iterations=20_000), state="running",
        node=NodeId("w1"), cluster=ClusterId("c1"), submitted_s=NOW_S - 700, started_s=NOW_S - 690,
    )  # fmt: skip
    progress = JobProgress(
        iteration=iteration, iterations=20_000, speed=speed, eta_s=(20_000 - iteration) / speed,
        loss=loss, phase="steady", aggregators=(AggregatorId("a10"), AggregatorId("a2")),
        updated_s=NOW_S,
    )  # fmt: skip
    return Job(record, progress)


def pending(
    id: str, why: str = "waits for 4 worker slots: 1 of 8 free; runs when a job ends"
) -> Job:
    record = JobRecord(spec=JobSpec(id=id, program=("x",)), submitted_s=NOW_S - 12, reason=why)
    return Job(record, None)


def failed(id: str, why: str = "rank 1 on w1 ended with code 3: " + "a long line " * 20) -> Job:
    record = JobRecord(
        spec=JobSpec(id=id, program=("x",), iterations=300), state="failed", reason=why,
        submitted_s=NOW_S - 9_000, started_s=NOW_S - 8_000, finished_s=NOW_S - 180,
    )  # fmt: skip
    return Job(record, JobProgress(iteration=175, iterations=300, updated_s=NOW_S - 180))


def listed(*jobs: Job, hidden: int = 0) -> Listed:
    return Listed(jobs, hidden, {"running": len(jobs)}, NOW_S)


def aggregator(id: str, drain: str = "", cluster: str = "c1", alive: bool = True) -> AggregatorInfo:
    beat = AggregatorHeartbeat(
        service="aggregator", id=id, incarnation=1, at_s=NOW_S, node=NodeId("n1"), cpu_share=1.0,
        addresses=(), buckets=9, jobs=3, held_bytes=104_000_000, busy_s=0.0, bytes_in=10**9,
        bytes_out=10**9,
    )  # fmt: skip
    record = AggregatorRecord(id=AggregatorId(id), cluster=ClusterId(cluster) if cluster else None)
    return AggregatorInfo(record=record, alive=alive, heartbeat=beat, drain=drain)
