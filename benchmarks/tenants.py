"""Isolation between tenants, live: what a job loses when its neighbour of another tenant begins to
push as fast as it is served, three times as often as it was profiled to.

Real services, real bytes, aggregators of 0.1 cores. Two emulated jobs of one worker and one server
share an aggregator; in the midst of its run the tenant `bad` computes nothing any more. `cyclic`
and `edf` hold it to its profile; `packed` puts both on one aggregator and lets tasks run as they
come: the control, which must cost the other more than its limit, or nothing was at stake. A job
alone is profiled first, and says how large tensors must be for the duty that both are to have.
Loss is of the speed that the job has alone, as the limit is; medians of iterations.

    python benchmarks/tenants.py [--policies packed cyclic edf] [--iterations 90] [--json FILE]
"""

import argparse
import asyncio
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import msgspec
from figures import Figure, Row, Skipped, show, this_command, write_json

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.embedded.cluster import CPU_SHARE
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay import calibrate, session
from slackwater.loadgen.replay.experiment import probed_scale
from slackwater.loadgen.replay.measures import LOSS_LIMIT, mean_iteration_s
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated
from slackwater.schemas.jobs import Aggregation, JobSpec

COMPUTE_S = 0.5
DUTY = 0.38
"""The part of one server that each job uses: both fit on one, and one of them alone can fill the
rest."""
ALONE_ITERATIONS = 24
POLICIES: tuple[Aggregation, ...] = ("packed", "cyclic", "edf")
SKIPPED = 4
"""Iterations around the change that belong to neither side."""
GIVE_UP_S = 300.0
LOOK_S = 0.5


def job(id: str, policy: Aggregation, iterations: int, scale: float) -> JobSpec:
    return emulated(
        id, "vgg19", workers=1, servers=1, iterations=iterations, compute_s=COMPUTE_S,
        bytes_scale=scale, seed=1, aggregation=policy,
    )  # fmt: skip


def spec_of(tenant: str, policy: Aggregation, scale: float, options: argparse.Namespace) -> JobSpec:
    hurried = options.iterations // 2
    count = options.iterations if tenant == "good" else hurried + 6 * (options.iterations - hurried)
    spec = job(f"{policy}-{tenant}", policy, count, scale)
    program = spec.program
    if tenant == "bad":
        program += ("--hurry-after", str(hurried))
    return msgspec.structs.replace(spec, tenant=tenant, program=program)


@dataclass(frozen=True)
class Outcome:
    policy: str
    alone_s: float
    before_s: float
    after_s: float
    bad_before_s: float
    bad_after_s: float
    together: float
    """The part of the time after the change in which they shared an aggregator."""
    reverted: int

    @property
    def loss(self) -> float:
        return 1.0 - self.alone_s / self.after_s


async def play(
    client: Client, policy: Aggregation, scale: float, alone_s: float, options: argparse.Namespace
) -> Outcome:
    good, bad = (spec_of(tenant, policy, scale, options) for tenant in ("good", "bad"))
    together: list[tuple[float, bool]] = []
    async with session.observed(client) as timeline, asyncio.timeout(GIVE_UP_S):
        for spec in (bad, good):
            timeline.expect(spec, client.clock.now_s())
            await client.submit(spec)
        while all(track.ended_s is None for track in timeline.tracks.values()):
            infos = await client.aggregators()
            both = any(i.heartbeat is not None and i.heartbeat.jobs == 2 for i in infos)
            together.append((client.clock.now_s(), both))
            await client.clock.sleep_until(client.clock.now_s() + LOOK_S)
    for spec in (bad, good):
        await client.cancel(spec.id)
    own, other = (timeline.tracks[spec.id].iterations for spec in (good, bad))
    hurried = options.iterations // 2
    changed_s = next(each.at_s for each in other if each.number > hurried)
    split = [each for each in own if each.number > options.iterations // 8]
    margin_s = SKIPPED * COMPUTE_S
    mine = [each.duration_s for each in split if each.at_s < changed_s - margin_s]
    later = [each.duration_s for each in split if each.at_s > changed_s + margin_s]
    return Outcome(
        policy,
        alone_s,
        statistics.median(mine[-hurried // 2 :]),
        statistics.median(later),
        statistics.median(i.duration_s for i in other if hurried // 2 < i.number <= hurried),
        statistics.median(i.duration_s for i in other if i.number > hurried + SKIPPED),
        statistics.mean(both for at_s, both in together if at_s > changed_s),
        sum(f == "reverted" for t in timeline.tracks.values() for _, f, _ in t.facts),
    )


async def compare(options: argparse.Namespace) -> list[Outcome]:
    made = ClusterOptions(
        controllers=1,
        aggregators=4,
        cpu_share=CPU_SHARE,
        master={"tenants": {"good": {"loss_limit": LOSS_LIMIT}, "bad": {"cpu_fraction": 0.9}}},
        controller={"reverts_max": 0},  # No job is moved away: only aggregators act.
        profiler={"window_iterations": 12, "profile_iterations": 5},
    )
    guess = calibrate.bytes_scale(CPU_SHARE, COMPUTE_S, DUTY)
    scale = await probed_scale(made, lone("probe", guess), guess, DUTY, lambda *_: None)
    print(f"tensors at {scale:.3f} of their bytes; the kernel's speed alone says {guess:.3f}")
    alone = Workload(
        name="alone", jobs=(lone("alone", scale),), bytes_scale=scale, time_scale=1.0, seed=1
    )
    async with EmbeddedCluster(made) as cluster, connect(cluster.url, "bench") as client:
        timeline = await session.replay(client, alone, lambda *_: None)
        alone_s = mean_iteration_s(timeline.tracks["alone"])
    if alone_s is None:
        raise SystemExit("the job that was alone told of no iteration")
    outcomes = []
    for policy in options.policies:
        async with EmbeddedCluster(made) as cluster, connect(cluster.url, "bench") as client:
            outcomes.append(await play(client, policy, scale, alone_s, options))
            print(told(outcomes[-1]), flush=True)
    return outcomes


def lone(id: str, scale: float) -> PlannedJob:
    """On a server of its own."""
    spec = job(id, "static", ALONE_ITERATIONS, scale)
    return PlannedJob(at_s=0.0, compute_s=COMPUTE_S, spec=spec)


def told(one: Outcome) -> str:
    return (
        f"{one.policy}: {one.alone_s:.3f} s alone, {one.before_s:.3f} s before, "
        f"{one.after_s:.3f} s after; loses {one.loss:.1%}; the one that misbehaves: "
        f"{one.bad_before_s:.3f} s, {one.bad_after_s:.3f} s; shared for {one.together:.0%} "
        f"of the time after; {one.reverted} reverted"
    )


def rows(outcomes: list[Outcome]) -> list[Row]:
    """Return the figures; only the reason where the control kept the limit or the jobs did not
    share."""
    made: list[Row] = []
    control = [one.loss for one in outcomes if one.policy == "packed"]
    for one in outcomes:
        name = f"{one.policy}, iteration beside a tenant that"
        made.append(Figure(f"{name} behaves", one.before_s, one.alone_s, "s", "alone",
                           lower_is_better=True))  # fmt: skip
        name += " misbehaves"
        if one.together <= 0.5:
            made.append(Skipped(name, f"they shared for {one.together:.0%} of the time only"))
        elif one.policy != "packed" and not (control and control[0] > LOSS_LIMIT):
            lost = f"{control[0]:.1%}" if control else "nothing, as it was not run"
            made.append(Skipped(name, f"inconclusive: the control lost {lost}"))
        else:
            goal = None if one.policy == "packed" else 1.0 / (1.0 - LOSS_LIMIT)
            made.append(Figure(name, one.after_s, one.alone_s, "s", "alone", goal=goal,
                               lower_is_better=True))  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--iterations", type=int, default=90)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    outcomes = asyncio.run(compare(options))
    found = rows(outcomes)
    show(f"One aggregator, two tenants, load {os.getloadavg()[0]:.1f}", found)
    if options.json is not None:
        write_json(options.json, this_command(), found)
    if any(isinstance(row, Skipped) or row.met is False for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
