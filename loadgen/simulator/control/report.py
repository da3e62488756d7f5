"""Loads of a simulated fleet's services, and the first that can give no more.

summary.json      one object per policy: jobs, services, the store, ceilings
windows.csv       by window of ten seconds and service: processor, messages, records
manifest.json     options, settings, version
core.png          each service's busiest instance over time, as a part of a core
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, Final

import msgspec
from rich.table import Table

from slackwater.loadgen.files import table_text, write_json
from slackwater.loadgen.plots import COLORS, figure
from slackwater.loadgen.simulator.control.scale import (
    PROGRAMS,
    SUBMITTERS,
    ControlOutcome,
    Sample,
)
from slackwater.loadgen.simulator.options import Options
from slackwater.web import report as web

MESSAGE_S: Final = 3e-6
"""Seconds of processor that the client library takes for a message, sent or received: measured live
by benchmarks/control_plane.py (docs/guide/scale.md), and not part of the simulation."""
RECORDS_PER_S: Final = 4500.0
"""Records a second that one bus server makes durable: measured live by the same."""
REAL: Final = ("master", "controller", "profiler", "worker")
"""Kinds that are the product's. The others are models: their processor says nothing."""
_KINDS: Final = {"c": "controller", "n": "worker", "a": "aggregator"}


class ServiceRow(msgspec.Struct, frozen=True):
    """One kind of service. Peaks are of the busiest instance in the busiest window."""

    kind: str
    instances: int
    messages_s: float
    """Messages in and out a second, of one instance on average."""
    messages_s_peak: float
    cpu: float
    """Part of one core: the simulated shell and core, and MESSAGE_S for each message."""
    cpu_peak: float
    longest_s: float
    """The longest time for which one callback, such as a core's step, held the loop."""
    records_s_peak: float


class ControlSummary(msgspec.Struct, frozen=True):
    policy: str
    nodes: int
    jobs: int
    accepted: int
    refused: int
    ended: int
    running_peak: int
    waiting_peak: int
    submit_p50_s: float
    submit_p99_s: float
    messages_s: float
    messages_s_peak: float
    records_s_peak: float
    rss_bytes: int
    """Memory of the simulation: all services, models and the simulated store."""
    simulated_s: float
    wall_s: float
    services: tuple[ServiceRow, ...]
    ceiling: str
    """The first that has no room left."""
    ceiling_at: float
    """At how many times this load: below 1, it has none now."""
    busiest_messages: dict[str, float]
    """Messages a second by `kind service.verb`, the ten that are most."""


def kind_of(party: str) -> str:
    """Return the kind of service; empty for a party that is a client."""
    if party in ("master", "profiler", PROGRAMS, SUBMITTERS):
        return party
    return _KINDS.get(party[:1], "") if party[1:].isdigit() else ""


def summarize(outcome: ControlOutcome) -> ControlSummary:
    samples = outcome.samples
    rows = tuple(
        _row(kind, outcome)
        for kind in REAL
        if any(kind_of(party) == kind for sample in samples for party in sample.cpu_s)
    )
    records_peak = max(sum(sample.stored.values()) / sample.lasted_s for sample in samples)
    room = {f"the processor of the {row.kind}": 1.0 / row.cpu_peak for row in rows if row.cpu_peak}
    room["records of one bus server"] = RECORDS_PER_S / records_peak if records_peak else 1e9
    ceiling = min(room, key=lambda name: room[name])
    answered = sorted(outcome.accepted_s) or [0.0]
    cuts = quantiles(answered, n=100) if len(answered) > 1 else answered * 99
    arrived = [sum(sample.arrived.values()) / sample.lasted_s for sample in samples]
    busiest = Counter(outcome.subjects).most_common(10)
    return ControlSummary(
        policy=outcome.policy,
        nodes=outcome.nodes,
        jobs=outcome.jobs,
        accepted=outcome.accepted,
        refused=outcome.refused,
        ended=outcome.ended,
        running_peak=max(sample.running for sample in samples),
        waiting_peak=max(sample.waiting for sample in samples),
        submit_p50_s=cuts[49],
        submit_p99_s=cuts[98],
        messages_s=fmean(arrived),
        messages_s_peak=max(arrived),
        records_s_peak=records_peak,
        rss_bytes=outcome.rss_bytes,
        simulated_s=outcome.simulated_s,
        wall_s=outcome.wall_s,
        services=rows,
        ceiling=ceiling,
        ceiling_at=room[ceiling],
        busiest_messages={name: count / outcome.simulated_s for name, count in busiest},
    )


def _row(kind: str, outcome: ControlOutcome) -> ServiceRow:
    parties = {p for sample in outcome.samples for p in sample.cpu_s if kind_of(p) == kind}
    loads = [_load(sample, party) for sample in outcome.samples for party in parties]
    messages, cpu, records = zip(*loads, strict=True)
    return ServiceRow(
        kind=kind,
        instances=len(parties),
        messages_s=fmean(messages),
        messages_s_peak=max(messages),
        cpu=fmean(cpu),
        cpu_peak=max(cpu),
        longest_s=max(outcome.longest_s.get(party, 0.0) for party in parties),
        records_s_peak=max(records),
    )


def _load(sample: Sample, party: str) -> tuple[float, float, float]:
    """Return messages a second, the part of a core, and records a second."""
    messages_s = (sample.arrived.get(party, 0) + sample.sent.get(party, 0)) / sample.lasted_s
    cpu = sample.cpu_s.get(party, 0.0) / sample.lasted_s + messages_s * MESSAGE_S
    return messages_s, cpu, sample.stored.get(party, 0) / sample.lasted_s


# For people ---------------------------------------------------------------------------------------


def tables(summaries: Sequence[ControlSummary]) -> Iterable[Table]:
    fleet = Table(
        *("policy", "nodes", "jobs", "accepted", "ended", "running", "waiting", "submit", "p99"),
        *("messages/s", "records/s", "first ceiling", "at"),
        title="The fleet: peaks of running and waiting jobs, of messages and records",
    )
    services = Table(
        *("policy", "service", "instances", "messages/s", "peak", "core", "peak"),
        *("longest step", "records/s"),
        title="One instance of each service, on average and at its peak",
    )
    for one in summaries:
        fleet.add_row(
            one.policy, f"{one.nodes:,}", f"{one.jobs:,}", f"{one.accepted:,}", f"{one.ended:,}",
            f"{one.running_peak:,}", f"{one.waiting_peak:,}", f"{one.submit_p50_s * 1e3:.0f} ms",
            f"{one.submit_p99_s * 1e3:.0f} ms", f"{one.messages_s_peak:,.0f}",
            f"{one.records_s_peak:,.0f}", one.ceiling, _times(one.ceiling_at),
        )  # fmt: skip
        for row in one.services:
            services.add_row(
                one.policy, row.kind, f"{row.instances:,}", f"{row.messages_s:,.1f}",
                f"{row.messages_s_peak:,.1f}", f"{row.cpu:.1%}", f"{row.cpu_peak:.1%}",
                f"{row.longest_s * 1e3:.0f} ms", f"{row.records_s_peak:,.0f}",
            )  # fmt: skip
    return fleet, services


def _times(load: float) -> str:
    return f"{load:,.0f} x this load" if load >= 10 else f"{load:.2g} x this load"


def write_report(
    folder: Path,
    options: Options,
    outcomes: Sequence[ControlOutcome],
    summaries: Sequence[ControlSummary],
) -> None:
    write_json(folder / "summary.json", list(summaries))
    manifest: dict[str, Any] = {
        "options": options,
        "settings": {each.policy: each.settings for each in outcomes},
        "message_s": MESSAGE_S,
        "records_per_s": RECORDS_PER_S,
        "version": version("slackwater"),
    }
    write_json(folder / "manifest.json", manifest)
    rows = [
        (each.policy, sample.until_s, kind, party, *_load(sample, party))
        for each in outcomes
        for sample in each.samples
        for party in sorted(sample.cpu_s)
        if (kind := kind_of(party)) in REAL
    ]
    header = ["policy", "until_s", "service", "instance", "messages_s", "core", "records_s"]
    (folder / "windows.csv").write_text(table_text(header, rows), encoding="utf-8")
    _draw(folder / "core.png", outcomes[0])
    sets = {each.policy: web.Result(web.figures_of(each, skip=("wall_s",))) for each in summaries}
    web.write(folder, made_page(outcomes, summaries), sets)


def made_page(
    outcomes: Sequence[ControlOutcome], summaries: Sequence[ControlSummary]
) -> web.Report:
    first = outcomes[0]
    begin_s = first.samples[0].until_s - first.samples[0].lasted_s
    busiest = [
        web.Series(
            kind,
            [
                (s.until_s - begin_s,
                 max((_load(s, p)[1] for p in s.cpu_s if kind_of(p) == kind), default=0.0))
                for s in first.samples
            ],
            step=False,
        )
        for kind in REAL
    ]  # fmt: skip
    rows = [row for one in summaries for row in one.services]
    return web.Report(
        title=f"The control plane of {first.nodes:,} simulated nodes",
        charts=[web.Chart("The busiest instance of each service: part of one core", busiest,
                          y="share")],
        tables=[
            web.table_of("The fleet", list(summaries), skip=("wall_s",)),
            *([web.table_of("One instance of each service", rows)] if rows else []),
        ],
        now_s=first.samples[-1].until_s - begin_s,
    )  # fmt: skip


def _draw(path: Path, outcome: ControlOutcome) -> None:
    with figure(path) as (_, axes):
        begin_s = outcome.samples[0].until_s - outcome.samples[0].lasted_s
        at_s = [sample.until_s - begin_s for sample in outcome.samples]
        for color, kind in zip(COLORS, REAL, strict=False):
            busiest = [
                max((_load(s, p)[1] for p in s.cpu_s if kind_of(p) == kind), default=0.0)
                for s in outcome.samples
            ]
            axes.plot(at_s, busiest, label=kind, color=color)
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
        axes.set_xlabel("time (s)")
        axes.set_ylabel("part of one core")
        axes.set_title(f"The busiest instance of each service: {outcome.nodes:,} nodes")
        axes.legend()
