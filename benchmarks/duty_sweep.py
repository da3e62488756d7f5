"""How many aggregators three VGG19 jobs need, and what they lose, as each keeps .1 to .5 of a
server busy: shared by the paper's scheme, and all three on one aggregator (the control).

Live: real services, real bytes, the bytes scale chosen for each duty by this machine's folding
speed. Loss is against the same job standalone (own servers) in the same cluster. Where the three
together ask for about a whole server or more, one aggregator must cost them over 10 %: else
aggregators are not short of CPU here and no saving means anything.

    python benchmarks/duty_sweep.py [--duties .1 .2 .3 .4 .5] [--time-scale .5]
"""

import argparse
import asyncio
import statistics
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from slackwater.common.domains.facts.timeline import Timeline
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.embedded.cluster import CPU_SHARE
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay import calibrate, session
from slackwater.loadgen.replay.experiment import standalone_workload
from slackwater.loadgen.replay.measures import (
    LOSS_LIMIT,
    duty,
    job_figures,
    loss,
    mean_iteration_s,
)
from slackwater.loadgen.replay.workload import COMPUTE_S, PlannedJob, Workload, emulated

WINDOW = 12
ITERATIONS = 90
SPACING_S = 6.0
err = Console(stderr=True)


@dataclass(frozen=True)
class Row:
    target: float
    duty: float | None
    aggregators: int
    loss_shared: float | None
    loss_packed: float


def three_jobs(scale: float, time_scale: float, tag: str) -> Workload:
    compute_s = COMPUTE_S["vgg19"] * time_scale
    jobs = tuple(
        PlannedJob(
            at_s=number * SPACING_S * time_scale,
            compute_s=compute_s,
            spec=emulated(
                f"{tag}-{number}",
                "vgg19",
                workers=2,
                servers=2,
                iterations=ITERATIONS,
                compute_s=compute_s,
                bytes_scale=scale,
                seed=number,
            ),
        )
        for number in range(3)
    )
    return Workload(name=tag, jobs=jobs, bytes_scale=scale, time_scale=time_scale, seed=0)


def quietly(timeline: Timeline, now_s: float) -> None:
    """A benchmark has no live display."""


async def sweep_one(client: Client, target: float, share: float, time_scale: float) -> Row:
    scale = calibrate.bytes_scale(share, time_scale, duty=target)
    err.print(f"duty {target:.2f}: bytes scale {scale:.3f}")
    tag = f"d{round(100 * target)}"
    work = three_jobs(scale, time_scale, tag)
    alone = standalone_workload(work, "vgg19", WINDOW).with_policy("static", tag)
    alone_s = mean_iteration_s(
        next(iter((await session.replay(client, alone, quietly)).tracks.values()))
    )
    assert alone_s is not None
    shared = await session.replay(client, work, quietly)
    packed_work = work.shortened(WINDOW + 2, 0.5).with_policy("packed", "packed")
    packed = await session.replay(client, packed_work, quietly)
    figures = job_figures(shared, dict.fromkeys(shared.tracks, alone_s), {}, share, WINDOW)
    losses = [row.loss for row in figures if row.loss is not None]
    lost = [loss(alone_s, mean_iteration_s(track)) or 0.0 for track in packed.tracks.values()]
    duties = [d for track in shared.tracks.values() if (d := duty(track, share)) is not None]
    return Row(
        target=target,
        duty=statistics.median(duties) if duties else None,
        aggregators=steady_aggregators(shared),
        loss_shared=max(losses, default=None),
        loss_packed=max(lost),
    )


def steady_aggregators(timeline: Timeline) -> int:
    """In use when the first job ends: all three are placed, none is being profiled."""
    first_end_s = min(track.ended_s or 0.0 for track in timeline.tracks.values())
    return [level for at_s, level in timeline.aggregators if at_s < first_end_s - 0.5][-1]


async def sweep(duties: list[float], time_scale: float) -> list[Row]:
    options = ClusterOptions(
        controllers=1,
        aggregators=8,
        cpu_share=CPU_SHARE,
        profiler={"window_iterations": WINDOW, "profile_iterations": 5},
    )
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "bench") as client:
        return [await sweep_one(client, target, cluster.cpu_share, time_scale) for target in duties]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duties", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--time-scale", type=float, default=0.5)
    options = parser.parse_args()
    rows = asyncio.run(sweep(options.duties, options.time_scale))
    table = Table(title="three VGG19 2s-2w jobs: 6 servers asked for", title_justify="left")
    for column in ("duty aimed at", "profiled", "aggregators", "ratio to servers", "worst loss",
                   "worst loss on one", "one breaks the limit"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.target:.2f}",
            "-" if row.duty is None else f"{row.duty:.2f}",
            str(row.aggregators),
            f"{row.aggregators / 6:.2f}",
            "-" if row.loss_shared is None else f"{row.loss_shared:.1%}",
            f"{row.loss_packed:.1%}",
            "yes" if row.loss_packed > LOSS_LIMIT else "no",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
