"""The published comparisons on the public traces, equal to the integer second.

Tiresias' and Muri's simulators on the same files: GPUs only counted, preemption free, whole
seconds. The 2DAS rows are the orders inside a queue that the paper leaves open.
"""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.interleaved import InterleavedModel
from slackwater.loadgen.simulator.gpu.metrics import Summary, job_figures, summarize
from slackwater.loadgen.simulator.gpu.workload import workload
from slackwater.loadgen.traces import read, select
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import Policy

pytestmark = [pytest.mark.traces]

TRACE3 = ("muri/trace3.csv", 64)
TRACE1 = ("muri/trace1.csv", 128)
ITP2 = ("elasticflow-itp/cluster02.csv", 96)
ITP3 = ("elasticflow-itp/cluster03.csv", 160)
PLAIN = {"limits": "3250,7200", "running_first": "false"}
SIXTY = ("tiresias/60_job.csv", 128)


def simulated(
    folder: Path, trace: tuple[str, int], policy: Policy, shared: bool = False
) -> Summary:
    path, gpus = trace
    jobs = workload(read(folder / path).jobs)
    model = InterleavedModel() if shared else FixedModel()
    result = Engine(jobs, Cluster.counted(gpus), policy, model, record=shared).run()
    return summarize("", result, job_figures(result, gpus), 0.0)


@pytest.mark.parametrize(
    ("trace", "policy", "average_s", "p95_s"),
    [
        (TRACE3, "fifo", 991_167, 1_479_578),
        (TRACE3, "best-effort", 480_105, 1_130_456),
        (TRACE3, "srtf", 180_116, 779_704),
        (TRACE3, "srsf", 172_684, 600_008),
        (TRACE1, "fifo", 2_993_895, 3_669_383),
        (TRACE1, "best-effort", 2_041_980, 3_724_502),
        (TRACE1, "srtf", 496_099, 4_382_231),
        (TRACE1, "srsf", 395_634, 2_059_940),
        (ITP2, "fifo", 498_311, 1_001_331),
        (ITP2, "best-effort", 150_317, 486_589),
        (ITP2, "srtf", 29_092, 114_904),
        (ITP2, "srsf", 27_915, 109_625),
        (ITP3, "fifo", 280_338, 832_683),
        (ITP3, "best-effort", 230_598, 706_770),
        (ITP3, "srtf", 46_234, 148_118),
        (ITP3, "srsf", 44_728, 138_634),
        (SIXTY, "fifo", 178, 368),
        (SIXTY, "best-effort", 178, 368),
    ],
)
def test_orders(
    traces_dir: Path, trace: tuple[str, int], policy: str, average_s: int, p95_s: int
) -> None:
    summary = simulated(traces_dir, trace, make(policy))
    assert summary.jobs == summary.completed
    assert round(summary.avg_jct_s) == average_s
    assert round(summary.p95_jct_s) == p95_s


@pytest.mark.parametrize(
    ("trace", "options", "average_s"),
    [
        (TRACE3, PLAIN, 436_851),
        (TRACE3, {"limits": "3250,7200"}, 333_926),
        (
            TRACE3,
            {**PLAIN, "order": "first_start"},
            437_007,
        ),
        (TRACE3, {**PLAIN, "order": "entry"}, 436_223),
        (TRACE3, {"limits": "3250,7200", "order": "entry"}, 343_121),
        (TRACE3, {}, 289_773),
        (ITP2, {"limits": "3250,7200"}, 39_364),
        (ITP2, {"limits": "3250,7200", "order": "entry"}, 42_599),
        (ITP2, {}, 34_065),
        (TRACE1, {"limits": "3250,7200", "order": "entry"}, 1_105_457),
        (ITP3, {"limits": "3250,7200", "order": "entry"}, 87_190),
    ],
)
def test_orders_inside_a_queue(
    traces_dir: Path, trace: tuple[str, int], options: dict[str, str], average_s: int
) -> None:
    summary = simulated(traces_dir, trace, make("tiresias-las", options))
    assert round(summary.avg_jct_s) == average_s


@pytest.mark.parametrize(
    ("trace", "published_s", "preemptions"), [(TRACE3, 315_223, 1.32), (ITP2, 37_197, 0.84)]
)
def test_2das_beats_the_published_simulator(
    traces_dir: Path, trace: tuple[str, int], published_s: int, preemptions: float
) -> None:
    las = simulated(traces_dir, trace, make("tiresias-las"))
    gittins = simulated(traces_dir, trace, make("tiresias-gittins"))
    assert las.avg_jct_s <= published_s
    assert las.preemptions / las.jobs <= preemptions
    assert gittins.avg_jct_s <= 1.01 * las.avg_jct_s


def test_co_location_beats_muri(traces_dir: Path) -> None:
    """Muri's own simulator needs 83,242 s on its own trace and stage times."""
    summary = simulated(traces_dir, TRACE3, Colocated(make("srsf")), shared=True)
    assert summary.completed == 992
    assert summary.avg_jct_s <= 83_242


@pytest.mark.slow
def test_a_week_of_philly(traces_dir: Path) -> None:
    """2017-10-09..15 at 432 GPUs: what preemption without knowledge of durations is worth."""
    trace = read(traces_dir / "philly/philly_gpu_jobs_2017-09_10.csv")
    monday_s = datetime(2017, 10, 9, tzinfo=UTC).timestamp() - trace.origin_s
    jobs = workload(select(trace.jobs, start_s=monday_s, end_s=monday_s + 7 * 86400))
    assert len(jobs) == 12_751
    figures = {}
    for policy in ("fifo", "tiresias-las"):
        result = Engine(jobs, Cluster.counted(432), make(policy), FixedModel(), record=False).run()
        figures[policy] = summarize(policy, result, job_figures(result, 432), 0.0)
    fifo, las = figures["fifo"], figures["tiresias-las"]
    assert fifo.avg_jct_s >= 3 * las.avg_jct_s
    assert fifo.median_jct_s >= 10 * las.median_jct_s
    assert las.avg_jct_s == pytest.approx(8167, abs=1)
