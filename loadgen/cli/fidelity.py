"""`loadgen experiment fidelity`: what the simulator says beside what a live cluster does."""

import time
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.table import Table

from slackwater.console.outcome import (
    FAILED,
    INCONCLUSIVE,
    Usage,
    err,
    out,
    print_json,
    report_folder,
    reported,
    run,
)
from slackwater.loadgen.fidelity import experiment
from slackwater.loadgen.fidelity.experiment import Fidelity, OnPhase, Plan
from slackwater.schemas.jobs import JobRecord

TELL_S = 5.0
"""Seconds between two lines of progress."""


def scale(text: str) -> float:
    """Read a factor, as 0.02 or 1/60. Raises Usage."""
    try:
        found = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        found = 0.0
    if not (found > 0.0 and isfinite(found)):
        raise Usage(f"--time-scale {text}: it must be above 0, as 0.02 or 1/60")
    return found


def play(plan: Plan, policies: list[str], folder: Path, json: bool) -> None:
    """Play the trace live under each policy, and say what the simulator got right."""
    with reported():
        plans = [_planned(plan, policy) for policy in policies]
        found = []
        for one in plans:
            report_folder(folder / one.policy)  # Before anything long begins.
            found.append(run(experiment.experiment(one, folder / one.policy, _telling())))
    if json:
        print_json([_document(each) for each in found])
    else:
        out.print(table(found))
        for each in found:
            out.print(_costs(each), highlight=False)
        out.print(f"report: {folder}", highlight=False)
    for each in found:
        for doubt in each.doubts():
            err.print(f"{each.plan.policy}: {doubt}", markup=False)
    code = max((_code(each) for each in found), default=0, key=(0, INCONCLUSIVE, FAILED).index)
    if code:
        raise typer.Exit(code)


def _planned(plan: Plan, policy: str) -> Plan:
    if policy not in experiment.POLICIES:
        raise Usage(f"--gpu-policy {policy}: choose {', '.join(experiment.POLICIES)}")
    return experiment.planned(plan, policy)


def replay(plan: Plan, folder: Path, json: bool) -> bool:
    """Play any trace live, beside its simulation, and print both. False: a job was lost, or the
    auditor found something. What is off is for its reader to judge."""
    report_folder(folder)  # Before anything long begins.
    found = run(experiment.experiment(plan, folder, _telling()))
    wrong = found.wrong()
    if json:
        print_json(_document(found))
    else:
        out.print(table([found]))
        out.print(_costs(found), highlight=False)
        out.print(f"report: {folder}", highlight=False)
    for each in wrong:
        err.print(f"failed: {each}", markup=False)
    return not wrong


def _code(found: Fidelity) -> int:
    if found.misses():
        return FAILED
    return INCONCLUSIVE if found.doubts() else 0


def _telling() -> OnPhase:
    told_s, heard = 0.0, ""

    def on_phase(phase: str, records: Mapping[str, JobRecord], at_s: float, jobs: int) -> None:
        nonlocal told_s, heard
        now_s = time.monotonic()
        if phase == heard and now_s - told_s < TELL_S:
            return
        told_s, heard = now_s, phase
        states = Counter(record.state for record in records.values())
        done = states.pop("completed", 0)
        others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        err.print(f"{phase}: {max(0.0, at_s):.0f} s, {done} of {jobs} jobs done; {others or '-'}")

    return on_phase


def table(found: list[Fidelity]) -> Table:
    """Lay out a row per policy: live / simulated."""
    shown = Table(title="Live beside simulated")
    heads = (
        "policy", "jobs", "mean JCT s", "off", "makespan s", "off", "jobs near", "preemptions",
        "moves", "tau", "audit", "lost", "ETA off", "control off", "verdict",
    )  # fmt: skip
    for name in heads:
        shown.add_column(name, justify="left" if name in ("policy", "verdict") else "right")
    for each in found:
        one, other = each.compared.live, each.compared.simulated
        shown.add_row(
            each.plan.policy, str(each.plan.jobs),
            f"{one.mean_jct_s:.2f} / {other.mean_jct_s:.2f}", f"{each.compared.mean_error:+.1%}",
            f"{one.makespan_s:.1f} / {other.makespan_s:.1f}",
            f"{each.compared.makespan_error:+.1%}", f"{each.compared.jobs_near:.0%}",
            f"{one.preemptions} / {other.preemptions}",
            f"{one.reallocations} / {other.reallocations}", f"{each.compared.tau:.3f}",
            "clean" if not each.findings else str(len(each.findings)), str(len(each.lost)),
            _share(each.eta_error), f"{each.control.mean_error:+.1%}",
            "pass" if not each.doubts() else "miss",
        )  # fmt: skip
    return shown


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _costs(found: Fidelity) -> str:
    costs = found.costs
    return (
        f"{found.plan.policy}: measured start {costs.start_s:.3f} s, stop {costs.stop_s:.3f} s, "
        f"restart {costs.restart_s:.3f} s ({costs.starts} jobs undisturbed, {costs.stops} paused); "
        f"master killed {found.kills} times; load {found.load:.1f}"
    )


def _document(found: Fidelity) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(found)
    return shown | {
        "mean_error": found.compared.mean_error,
        "makespan_error": found.compared.makespan_error,
        "doubts": found.doubts(),
    }
