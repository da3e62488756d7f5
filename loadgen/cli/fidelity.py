"""`loadgen experiment fidelity`: what the simulator says beside what a live cluster does."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec
import typer

from slackwater.console import tables
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
from slackwater.console.tables import Row
from slackwater.loadgen.fidelity import experiment
from slackwater.loadgen.fidelity.experiment import Fidelity, OnPhase, Plan
from slackwater.schemas.jobs import JobRecord

TELL_S = 5.0
"""Seconds between two lines of progress."""
_PHASES: Final = {"costs": "measuring starts and stops"}


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
        print_json([document(each) for each in found])
    else:
        tables.show(table(found))
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
        print_json(document(found))
    else:
        tables.show(table([found], verdict=False))
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
        name = _PHASES.get(phase, phase)
        err.print(f"{name}: {max(0.0, at_s):.0f} s, {done} of {jobs} jobs done; {others or '-'}")

    return on_phase


def table(found: Sequence[Fidelity], verdict: bool = True) -> list[str]:
    """Lay out a column per run: live / simulated. `verdict`: say whether each keeps its bounds."""
    columns = [measures(each) for each in found]
    names = [name for name in columns[0] if verdict or name != "verdict"]
    rows = [Row((name, *(column[name] for column in columns))) for name in names[1:]]
    return tables.lines((names[0], *(column[names[0]] for column in columns)), rows)


def summary(found: Sequence[Fidelity]) -> list[str]:
    """Lay out a row per run."""
    rows = [measures(each) for each in found]
    return tables.lines(tuple(rows[0]), [Row(tuple(row.values())) for row in rows])


def measures(found: Fidelity) -> dict[str, str]:
    """Tell what was measured, by its name; two values are live / simulated."""
    one, other = found.compared.live, found.compared.simulated
    return {
        "policy": found.plan.policy,
        "seed": str(found.plan.seed),
        "jobs": str(found.plan.jobs),
        "mean JCT s": f"{one.mean_jct_s:.2f} / {other.mean_jct_s:.2f}",
        "off": f"{found.compared.mean_error:+.1%}",
        "makespan s": f"{one.makespan_s:.1f} / {other.makespan_s:.1f}",
        "makespan off": f"{found.compared.makespan_error:+.1%}",
        "jobs near": f"{found.compared.jobs_near:.0%}",
        "preemptions": f"{one.preemptions} / {other.preemptions}",
        "moves": f"{one.reallocations} / {other.reallocations}",
        "tau": f"{found.compared.tau:.3f}",
        "audit": "clean" if not found.findings else str(len(found.findings)),
        "lost": str(len(found.lost)),
        "kills": str(found.kills),
        "ETA off": "-" if found.eta_error is None else f"{found.eta_error:.0%}",
        "control off": f"{found.control.mean_error:+.1%}",
        "verdict": "pass" if not found.doubts() else "miss",
    }


def _costs(found: Fidelity) -> str:
    costs = found.costs
    return (
        f"{found.plan.policy}: measured start {costs.start_s:.3f} s, stop {costs.stop_s:.3f} s, "
        f"restart {costs.restart_s:.3f} s ({costs.starts} jobs undisturbed, {costs.stops} paused); "
        f"master killed {found.kills} times; load {found.load:.1f}"
    )


def document(found: Fidelity) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(found)
    return shown | {
        "mean_error": found.compared.mean_error,
        "makespan_error": found.compared.makespan_error,
        "doubts": found.doubts(),
    }
