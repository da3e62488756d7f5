"""Simulations whose event logs are recorded: command lines of `loadgen simulate`.

`{inputs}` is the folder that inputs.py fills, `{root}` the repository, `{traces}` the folder of
public traces. Each policy that a command names is one recorded log.
"""

from typing import Final, NamedTuple

ORDERED: Final = (
    "best-effort", "fifo", "gandiva", "isolated", "sf", "srsf", "srtf", "tiresias-gittins",
    "tiresias-las",
)  # fmt: skip
"""Policies that order a queue: quotas, priorities and GPU types hold under them."""
SIZED: Final = ("equal-share", "hell", "jsq-chunk", "knee", "srpt", "waterfill")
DIVIDED: Final = (*SIZED, "easy-backfill", "tiresias-artifact")
"""Policies that are asked for each tenant's part of the cluster."""
ANY: Final = (*ORDERED, *SIZED, "easy-backfill", "naive-colocation", "tiresias-artifact")
"""Policies that need nothing of a job model."""

MIXED = "{inputs}/mixed.csv --nodes 4"
BURST = "{inputs}/burst.csv --nodes 3"
ELASTIC = "{inputs}/elastic.csv --job-model profiles --set profiles.folder={inputs}/profiles"
LIN = "generate:lin,jobs=40,nodes=16,load=0.9 --nodes 16 --gpus-per-node 1 --job-model queueing"
HARMONY = (
    "generate:harmony,mean_gap_s=200 --jobs 30 --nodes 100 --gpus-per-node 1 --job-model subtasks"
)
POLLUX = "--set pollux.steps=20"
TYPES = "{inputs}/mixed.csv --cluster 3x4:t4,3x4:v100"
COSTS = "--start-s 10 --restart-s 30 --restart-by-model vgg19=40,alexnet=5"
SELDOM = "--set gandiva.quantum_s=14400 --set tiresias-artifact.round_s=7200"
"""Rounds for traces of days."""
FAILURES = "--mtbf-s 20000 --repair-s 900 --checkpoint-s 300 --restart-s 20"
SLOWDOWNS = "--spread-slowdown 2 --interference 0.3"


class Case(NamedTuple):
    """One command line. `fitted`: its numbers come from solvers and logarithms, whose last digits
    depend on the machine."""

    words: str
    policies: tuple[str, ...]
    fitted: bool = False

    @property
    def recorded(self) -> bool:
        """Does it read the folder of public traces?"""
        return "{traces}" in self.words


CASES: Final[dict[str, Case]] = {
    "machines": Case(MIXED, ANY),
    "burst": Case(BURST, ANY),
    "counted": Case(f"{MIXED} --overhead none", ANY),
    "sample": Case(f"{{root}}/loadgen/samples/philly.csv --nodes 4 --restart-s 30 {SELDOM}", ANY),
    "testbed": Case(f"generate:tiresias --jobs 100 --max-gpus 16 --nodes 10 {COSTS}", ANY),
    "testbed-second-seed": Case(
        "generate:tiresias --jobs 60 --max-gpus 16 --seed 2 --nodes 8", ANY
    ),
    "costs": Case(f"{BURST} {COSTS}", ANY),
    "failures": Case(f"{MIXED} {FAILURES} --seed 7", ANY, fitted=True),
    "failures-unsaved": Case(f"{BURST} --mtbf-s 3000 --repair-s 60", ANY, fitted=True),
    "slowdowns": Case(f"{MIXED} {SLOWDOWNS} --restart-s 15", ANY),
    "types-with-speeds": Case(f"{TYPES} --speeds {{inputs}}/speeds.json", ORDERED),
    "types-alike": Case(f"{TYPES} {COSTS}", ORDERED),
    "types-failing": Case(
        f"{TYPES} --speeds {{inputs}}/speeds.json {FAILURES}", ORDERED, fitted=True
    ),
    "quotas-equal": Case(f"{MIXED} --quotas equal", ORDERED),
    "quotas-unequal": Case(f"{BURST} --quotas red=8,green=4,blue=0 --restart-s 5", ORDERED),
    "quotas-strict": Case(f"{MIXED} --quotas red=8,green=8,blue=8 --no-borrowing", ORDERED),
    "quotas-on-types": Case(f"{TYPES} --quotas equal --min-run-s 300", ORDERED),
    "quotas-divided": Case(f"{MIXED} --mode malleable --quotas equal --restart-s 30", DIVIDED),
    "quotas-divided-strict": Case(
        f"{BURST} --quotas red=8,green=8,blue=8 --no-borrowing --min-run-s 120", DIVIDED
    ),
    "priorities": Case(
        f"{MIXED} --priorities",
        (*ORDERED, "equal-share", "hell", "knee", "srpt", "waterfill"),
    ),
    "min-run": Case(f"{MIXED} --min-run-s 600 --restart-s 30", ORDERED),
    "min-run-quotas-priorities": Case(
        f"{BURST} --min-run-s 120 --quotas equal --priorities", ORDERED
    ),
    "malleable": Case(f"{MIXED} --mode malleable --restart-s 30", ANY),
    "malleable-failing": Case(f"{BURST} --mode malleable {FAILURES}", SIZED, fitted=True),
    "moldable": Case(f"{MIXED} --mode moldable", SIZED),
    "colocated": Case(f"{MIXED} --colocate 2", ORDERED),
    "colocated-three": Case(
        f"{BURST} --colocate 3 --restart-s 10 --set srsf.colocate_gain=0.3 "
        "--set srsf.colocate_stay=0.1 --set fifo.colocate_gain=0",
        ORDERED,
    ),
    "colocated-failing": Case(f"{BURST} --colocate 2 {FAILURES}", ORDERED, fitted=True),
    "interleaved": Case(f"{MIXED} --job-model interleaved", ("naive-colocation", "isolated")),
    "consolidated": Case(
        f"{MIXED} {SLOWDOWNS} --set fifo.consolidate=require --set best-effort.consolidate=no "
        "--set sf.consolidate=require --set srtf.consolidate=no --set srsf.consolidate=require "
        "--set gandiva.consolidate=no --set gandiva.quantum_s=300",
        ("fifo", "best-effort", "sf", "srtf", "srsf", "gandiva"),
    ),
    "patient": Case(
        f"{MIXED} --set sf.preemptive=false --set srtf.preemptive=false "
        "--set srsf.preemptive=false --set jsq-chunk.chunk=8 --set tiresias-artifact.round_s=300 "
        "--set tiresias-artifact.limit_gpu_s=3000 --set naive-colocation.ways=3 "
        "--set naive-colocation.stride=2",
        ("sf", "srtf", "srsf", "jsq-chunk", "tiresias-artifact", "naive-colocation"),
    ),
    "tiresias-promotes": Case(
        f"{MIXED} --restart-s 30 --set tiresias-las.limits=600,3000,9000 "
        "--set tiresias-las.promote_knob=2 --set tiresias-gittins.promote_knob=4 "
        "--set tiresias-gittins.learn_jobs=5",
        ("tiresias-las", "tiresias-gittins"),
    ),
    "tiresias-in-rounds": Case(
        f"{MIXED} --set tiresias-las.round_s=120 --set tiresias-las.running_first=false "
        "--set tiresias-gittins.round_s=60 --set tiresias-gittins.learn_jobs=5 "
        "--set tiresias-gittins.limits=1200",
        ("tiresias-las", "tiresias-gittins"),
    ),
    "tiresias-packs": Case(
        f"generate:tiresias --jobs 80 --nodes 10 {SLOWDOWNS} --set tiresias-las.pack_limit=0.1 "
        "--set tiresias-gittins.pack_limit=0.5",
        ("tiresias-las", "tiresias-gittins"),
    ),
    "why": Case(f"{MIXED} --why-at 3000 --why-at 6000 --why-at 9000", ANY),
    "why-limited": Case(
        f"{MIXED} --why-at 3000 --why-at 9000 --quotas equal --min-run-s 900 --priorities", ORDERED
    ),
    "pollux-rigid": Case(f"{MIXED} {POLLUX} --restart-s 30", ("pollux",), fitted=True),
    "pollux-malleable": Case(f"{BURST} {POLLUX} --mode malleable", ("pollux",), fitted=True),
    "pollux-min-run": Case(
        f"{BURST} {POLLUX} --min-run-s 300 {FAILURES}", ("pollux",), fitted=True
    ),
    "pollux-types": Case(
        f"{TYPES} --speeds {{inputs}}/speeds.json {POLLUX}", ("pollux",), fitted=True
    ),
    "profiles": Case(
        f"{ELASTIC} --nodes 3 --restart-s 30 {POLLUX}",
        (*ORDERED, *SIZED, "tiresias-artifact", "optimus", "pollux"),
        fitted=True,
    ),
    "profiles-of-the-trace": Case(
        f"{ELASTIC} --nodes 3 --set profiles.batch=trace {POLLUX}",
        ("fifo", "optimus", "pollux", "srtf"),
        fitted=True,
    ),
    "profiles-tuned-by-jobs": Case(
        f"{ELASTIC} --nodes 3 --set profiles.batch=job --set profiles.known=true {POLLUX} "
        "--set optimus.round_s=120 --set pollux.p=-10 --set pollux.seed=3 --set pollux.growth=4",
        ("optimus", "pollux", "srtf", "tiresias-las"),
        fitted=True,
    ),
    "profiles-failing": Case(
        f"{ELASTIC} --nodes 4 {FAILURES} {SLOWDOWNS} {POLLUX}",
        ("optimus", "pollux", "srsf", "tiresias-las", "waterfill"),
        fitted=True,
    ),
    "profiles-on-types": Case(
        f"{ELASTIC} --cluster 2x4:t4,2x4:v100 --speeds {{inputs}}/speeds.json {POLLUX}",
        ("pollux", "srtf", "tiresias-las"),
        fitted=True,
    ),
    "profiles-interfering": Case(
        f"{ELASTIC} --nodes 4 --interference 0.5 {POLLUX} --set pollux.avoid_interference=false "
        "--set pollux.delay_s=60 --set pollux.round_s=120 --set profiles.throughput_only=true",
        ("pollux",),
        fitted=True,
    ),
    "scaled": Case(
        f"{ELASTIC} --jobs 8 --nodes 1 --nodes-max 4 --provision-s 120 {POLLUX} "
        "--set pollux.scale=true --set profiles.throughput_only=true",
        ("pollux",),
        fitted=True,
    ),
    "queueing": Case(LIN, (*SIZED, "fifo", "gandiva", "srsf", "tiresias-las"), fitted=True),
    "queueing-moldable": Case(
        f"{LIN} --mode moldable --set hell.filling=false --set hell.gamma=0.1 "
        "--set knee.strict=true --set knee.load=0.9 --set queueing.charge_server=true",
        ("hell", "knee", "srpt", "jsq-chunk"),
        fitted=True,
    ),
    "queueing-failing": Case(
        f"{LIN} --mtbf-s 20000000 --repair-s 90000 --restart-s 1000 --set queueing.servers=2",
        SIZED,
        fitted=True,
    ),
    "subtasks": Case(
        HARMONY,
        (*SIZED, "harmony", "isolated", "naive-colocation", "srsf", "tiresias-las"),
        fitted=True,
    ),
    "subtasks-untuned": Case(
        f"{HARMONY} --restart-s 60 --set harmony.tune=false --set harmony.gain=0.2 "
        "--set harmony.fewer_jobs=0.1 --set naive-colocation.ways=3",
        ("harmony", "naive-colocation"),
        fitted=True,
    ),
    "subtasks-failing": Case(
        f"{HARMONY} --mtbf-s 2000000 --repair-s 1800 --restart-s 60 --checkpoint-s 600",
        ("harmony", "isolated", "naive-colocation", "equal-share"),
        fitted=True,
    ),
    "muri": Case(
        f"{{traces}}/muri/trace1.csv --jobs 80 --max-gpus 16 --nodes 8 --restart-s 30 {SELDOM}", ANY
    ),
    "muri-colocated": Case(
        "{traces}/muri/trace3.csv --jobs 60 --max-gpus 16 --nodes 2 --gpus-per-node 8 "
        "--colocate 4 --set gandiva.quantum_s=14400",
        ORDERED,
    ),
    "itp": Case(
        f"{{traces}}/elasticflow-itp/cluster02.csv --jobs 100 --max-gpus 16 --nodes 4 {SELDOM}", ANY
    ),
    "philly": Case(
        "{traces}/philly/philly_gpu_jobs_2017-09_10.csv --jobs 100 --max-gpus 16 --nodes 4 "
        f"--overhead none --time-scale 0.1 {SELDOM}",
        ANY,
    ),
    "gavel": Case(
        "{traces}/gavel/max_min_fairness.trace --jobs 60 --max-gpus 4 "
        "--cluster 1x4:k80,1x4:p100,1x4:v100 "
        "--throughputs {traces}/gavel/simulation_throughputs.json --set gandiva.quantum_s=3600",
        ORDERED,
    ),
    "pollux-trace": Case(
        "{traces}/pollux/workloads/workload-1.csv --jobs 16 --max-gpus 16 --nodes 4 "
        "--job-model profiles --set profiles.folder={traces}/pollux/profiles "
        f"{POLLUX} --restart-s 30",
        ("optimus", "pollux", "tiresias-las"),
        fitted=True,
    ),
}
