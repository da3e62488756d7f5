"""A search's trials under Pollux and under a static split: the miniature of table 3.3.

    python benchmarks/tune.py [--trials 12] [--at-once 4] [--json FILE]

Simulated, from the measured profiles of cifar10, on 4 machines of 4 GPUs: a trial begins whenever
fewer than `--at-once` are at work, as `slackwater.tune` submits them. The peer gives each trial 4
GPUs and a batch of 2048, as the thesis' table 3.3 (section 3.5.5) does; under Pollux trials share
all GPUs and tune their batch. Published: 25 and 34 min a trial, 10 and 14 h in all, on 16 A100 with
100 trials. Accuracy is not simulated. Needs the published traces (SLACKWATER_TRACES).
"""

import argparse
import os
from pathlib import Path
from statistics import mean

from figures import Figure, show, this_command, write_json

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.applications import Application, read_applications
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import Options, ProfilesModel
from slackwater.loadgen.simulator.gpu.outcome import Costs, Outcome, Settings
from slackwater.loadgen.simulator.gpu.workload import workload
from slackwater.loadgen.traces.record import TraceJob
from slackwater.services.master.scheduling.registry import make

NODES, NODE_GPUS, GPUS_EACH, BATCH = 4, 4, 4, 2048
RESTART_S = 30.0
PUBLISHED_TRIAL, PUBLISHED_ALL = 25 / 34, 10 / 14


def run(policy: str, submitted_s: list[float], cifar10: Application) -> list[Outcome]:
    rows = [
        TraceJob(id=f"t-{n}", submit_s=at_s, gpus=GPUS_EACH, model="cifar10", batch_size=BATCH)
        for n, at_s in enumerate(submitted_s)
    ]
    chosen = make(policy)
    model = ProfilesModel.of({"cifar10": cifar10}, Options(adaptive=policy == "pollux"))
    jobs = model.adapt(workload(rows), chosen)
    settings = Settings(costs=Costs(start_s=RESTART_S, restart_s=RESTART_S))
    return Engine(jobs, Cluster([(NODE_GPUS, "")] * NODES), chosen, model, settings).run().outcomes


def search(policy: str, trials: int, at_once: int, cifar10: Application) -> tuple[float, float]:
    """Return the mean seconds of a trial, and those of all. Nothing before a submission depends on
    it, so that each run says when the next trial begins."""
    submitted_s = [0.0] * min(at_once, trials)
    while len(submitted_s) < trials:
        ends = sorted(outcome.end_s for outcome in run(policy, submitted_s, cifar10))
        submitted_s.append(ends[len(submitted_s) - at_once])
    outcomes = run(policy, submitted_s, cifar10)
    took_s = [outcome.end_s - outcome.job.submit_s for outcome in outcomes]
    return mean(took_s), max(outcome.end_s for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(os.environ.get("SLACKWATER_TRACES", "../shared/traces")) / "pollux" / "profiles"
    cifar10 = read_applications(folder)["cifar10"]
    ours, static = (
        search(policy, options.trials, options.at_once, cifar10) for policy in ("pollux", "fifo")
    )
    rows = [
        Figure("a trial", ours[0] / 60, static[0] / 60, "min", "static split", 1.0, True),
        Figure("all trials", ours[1] / 3600, static[1] / 3600, "h", "static split", 1.0, True),
    ]
    show(f"{options.trials} trials of cifar10, {options.at_once} at once (simulated)", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)
    print(
        f"Published: {PUBLISHED_TRIAL:.2f} of the static split's trial, {PUBLISHED_ALL:.2f} in all."
    )


if __name__ == "__main__":
    main()
