"""`slackwater compile`: what would be compiled when it is first used, compiled now and kept."""

import importlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from time import process_time
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slackwater.console import outcome
from slackwater.console.options import Json


def folds() -> None:
    """Compile the folds of aggregators: float32 gradients of up to four workers, by every update
    rule."""
    from slackwater.common.domains.slots import row_kernels
    from slackwater.common.domains.slots.kernels import warm
    from slackwater.common.domains.slots.rules import RULES

    for rule in RULES:
        row_kernels.warm(rule, "float32")
        for workers in (1, 2, 4):
            warm(rule, "float32", workers)


def streams() -> None:
    """Both ends of one-sided tcp; compiled where they are defined."""
    for end in ("target_kernels", "initiator_kernels"):
        importlib.import_module(f"slackwater.common.transport.{end}")


def pages() -> None:
    """The block device and arrays of remote memory."""
    from slackwater.memory.service.warm import warm

    warm()


def goodput() -> None:
    """Pollux: the fit of its model and one round of its search."""
    from slackwater.common.domains.models.fitting import Observation, fit
    from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel, GoodputProfile
    from slackwater.schemas.base import JobId, NodeId
    from slackwater.services.master.scheduling.policies.pollux import Pollux
    from slackwater.services.master.scheduling.view import ClusterView, JobView, NodeView, View

    theta = fit([Observation(1, 1, 8, 0, 0.1), Observation(1, 2, 8, 0, 0.12)])
    report = GoodputProfile(
        GoodputModel(theta, 100.0, BatchLimits(initial=8, total_max=64, per_gpu_max=8)), 2
    )
    jobs = {
        JobId(f"j{n}"): JobView(
            id=JobId(f"j{n}"), number=n, submitted_s=0, gpus=1, gpus_min=1, gpus_max=2,
            profile=report,
        )
        for n in range(2)
    }  # fmt: skip
    cluster = ClusterView((NodeView(0, NodeId("n0"), 2, ""),), 2, ("",), 2)
    Pollux().allocate(View(600.0, cluster, jobs, [2], None), None)


def packets() -> None:
    """The walk over a ring of packets, by which jobs are watched."""
    from slackwater.common.native.packet_ring import warm

    warm()


PARTS: dict[str, Callable[[], None]] = {
    "pages": pages,
    "folds": folds,
    "goodput": goodput,
    "streams": streams,
    "packets": packets,
}
"""The longest first."""


def timed(part: str) -> float:
    began_s = process_time()
    PARTS[part]()
    return process_time() - began_s


def _chosen(parts: list[str]) -> list[str]:
    """Raises Usage: no such part."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise outcome.Usage(f"part {unknown[0]!r}: choose {', '.join(PARTS)}")
    return parts or list(PARTS)


def compile_all(
    parts: Annotated[
        list[str] | None,
        typer.Argument(help=f"Parts to compile: {', '.join(PARTS)}; by default all."),
    ] = None,
    json: Json = False,
) -> None:
    """Compile what services, devices and policies would compile when they first need it.

    Takes a minute of processor time on a new installation or after an upgrade, else seconds.
    """
    with outcome.reported():
        chosen = _chosen(parts or [])
    took_s: dict[str, float] = {}
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, disable=json, transient=True) as progress,
        ProcessPoolExecutor(mp_context=spawn, max_tasks_per_child=1) as pool,
    ):
        bar = progress.add_task("", total=len(chosen))
        begun = {pool.submit(timed, part): part for part in chosen}
        for done in as_completed(begun):
            took_s[begun[done]] = done.result()
            progress.advance(bar)
    if json:
        outcome.print_json({"compiled_cpu_s": took_s})
    else:
        told = ", ".join(f"{part} {took_s[part]:.1f} s" for part in chosen)
        outcome.out.print(f"compiled and kept (processor time): {told}")
