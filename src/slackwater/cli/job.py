"""`slackwater job ID`: all that is known of one job."""

import shlex
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from slackwater.cli import tuning
from slackwater.cli.ends import Ends, foretold
from slackwater.cli.events import recent_events
from slackwater.cli.job_ids import JobId
from slackwater.cli.replay import show_journal
from slackwater.cli.show import with_client
from slackwater.client.logs import last_lines, ranks_of
from slackwater.common.base.words import number_of
from slackwater.common.shell.client import Client
from slackwater.common.store.history import NothingKept
from slackwater.console import documents, figures, gpus, tables
from slackwater.console.names import EMULATED
from slackwater.console.options import Json, Url
from slackwater.console.outcome import out, print_json
from slackwater.console.sizes import human
from slackwater.console.tables import Row
from slackwater.schemas.cluster import PermitUse, TurnGroup
from slackwater.schemas.hangs import Hang
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.job_states import TERMINAL_STATES, WAITING_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.terminals import command_of
from slackwater.services.master.gangs import last_placed

LABEL: Final = 13
INDENT: Final = "  "
RANK_HEADS: Final = ("RANK", "PROGRESS", "SPEED", "LAST REPORT")
EVENTS: Final = 10
LINES: Final = 3
"""Lines of each rank's log."""
RANKS: Final = 4


def job(
    id: JobId,
    journal: Annotated[
        bool, typer.Option("--journal", help="Show the journal of a job of virtual ranks.")
    ] = False,
    history: Annotated[
        bool, typer.Option(help="How its batch, rate and efficiency changed, by its reports.")
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Describe one job: its request, progress and place, why it waits, when a job with GPUs will
    end, and its result."""

    async def seen(client: Client) -> tuple[JobInfo, Ends | None, list[str], float]:
        info = await client.job_info(id)
        ends = await foretold(client, info.job)
        past = [] if json else await past_of(client, info)
        return info, ends, past, client.clock.now_s()

    info, ends, past, now_s = with_client(url, seen)
    if journal:
        show_journal(info.job.spec, json=json)
        return
    if json:
        found = documents.job(info.job, info.progress) | {"ends": ends}
        print_json(
            found
            | {"hang": documents.whole(info.hang)}
            | {"group": documents.whole(info.group), "turns": documents.whole(info.turns)}
            | ({"history": documents.whole(info.history)} if history else {})
        )
        return
    width = out.width if out.is_terminal else None
    tuned = tuning.table(info.history, width) if history else []
    tables.show([*described(info, now_s, width, ends), *tuned, *past])


async def past_of(client: Client, info: JobInfo) -> list[str]:
    """Tell what happened to the job and when, and what it printed last: lines at the end of its
    description."""
    record = last_placed(info.job)
    past = await _steps(client, record)
    printed: list[str] = []
    for rank in ranks_of(record)[:RANKS] if record.spec.program and record.node else ():
        lines = await last_lines(client, record, rank, LINES)
        printed += [f"{INDENT}rank {rank} | {line}" for line in lines]
    return [*past, *(["Log:", *printed] if printed else [])]


async def _steps(client: Client, record: JobRecord) -> list[str]:
    try:
        told = await recent_events(client, record.spec.id, EVENTS)
    except NothingKept:
        told = []
    if told:
        return ["Events:", *(INDENT + each for each in told)]
    steps = [(record.submitted_s, "submitted")]
    if record.started_s:
        steps.append((record.started_s, "started" + (f" on {record.node}" if record.node else "")))
    if record.finished_s:
        steps.append((record.finished_s, record.state))
    return ["History:", *(f"{INDENT}{figures.at(at_s)}  {what}" for at_s, what in steps)]


def described(
    info: JobInfo, now_s: float, width: int | None = None, ends: Ends | None = None
) -> list[str]:
    """Describe the job label by label, with its ranks in a table. `width`: columns of the
    terminal."""
    record, progress = info.job, info.progress
    facts = [*_facts(record, progress, now_s), *([("Ends", ends.said())] if ends else [])]
    turns = [*([_group(info.group)] if info.group else []), *map(_turns, info.turns)]
    facts += [("Turns" if not at else "", each) for at, each in enumerate(turns)]
    found = [f"{label + ':' * bool(label):<{LABEL}} {text}".rstrip() for label, text in facts]
    rows = list(_ranks(record, progress, now_s))
    if rows:
        found += ["Ranks:", *(INDENT + line for line in _rank_table(rows, width))]
    if info.hang is not None:
        found += ["Hangs:", *(INDENT + line for line in _stacks(info.hang))]
    return found


def _group(group: TurnGroup) -> str:
    """Say how far the job is with those that it shares nodes with."""
    found: str = group.state
    if group.nodes:
        found += (
            f": an iteration computes for {group.computing_s:.3g} s and moves bytes for "
            f"{group.moving_s:.3g} s on {number_of(group.nodes, 'node')}"
        )
    if group.shares_with:
        found += f"; it shares nodes with {', '.join(group.shares_with)}"
    return found


def _turns(turns: PermitUse) -> str:
    had = (
        f"{turns.node}: computed {turns.computed_s:.1f} s, moved bytes {turns.moved_s:.1f} s, "
        f"waited {turns.waited_s:.1f} s for its turn"
    )
    if turns.memory_bytes:
        had += (
            f"; it may use {turns.memory_bytes / 1e6:,.0f} MB of memory, and waited "
            f"{turns.stalled_s:.1f} s for data that are in files"
        )
    if not turns.late:
        return had
    return f"{had}; kept a permit too long {number_of(turns.late, 'time')}: others went on"


def _stacks(hang: Hang) -> Iterator[str]:
    for one in hang.ranks[:RANKS]:
        yield f"rank {one.rank} on {one.node}" + (f": {one.look.why}" if one.look.why else "")
        yield from (f"  {line}" for line in one.look.stack.splitlines())


def _rank_table(rows: list[Row], width: int | None) -> list[str]:
    room = None if width is None else width - len(INDENT)
    return tables.lines(RANK_HEADS, rows, room, note="RESULT")


def _facts(
    record: JobRecord, progress: JobProgress | None, now_s: float
) -> Iterator[tuple[str, str]]:
    spec, ended = record.spec, record.state in TERMINAL_STATES
    yield "Job", spec.id
    yield "State", _state(record, now_s)
    if record.reason:
        yield (
            ("Reason" if ended else "Waits" if record.state in WAITING_STATES else "Why"),
            record.reason,
        )
    yield "Program", _program(record)
    if spec.code:
        yield "Code", f"{spec.code[:12]}, sent to its nodes"
    if spec.venv:
        yield "Venv", f"{spec.venv[:12]}, sent to its nodes"
    if spec.folder:
        yield "Folder", spec.folder
    if spec.model:
        yield "Model", spec.model
    if spec.tenant:
        yield "Tenant", spec.tenant
    asked = [number_of(spec.workers, "worker"), number_of(spec.servers, "server")]
    if spec.iterations > 1:
        asked.append(f"{spec.iterations:,} iterations")
    yield "Asked for", ", ".join(asked)
    if spec.elastic and not ended and (size := _size(record)):
        yield "Workers", size
    yield from _gpus(record)
    yield "Mode", figures.mode(spec)
    if record.sums:
        yield "Aggregation", "adds gradients up, the optimiser is in the program"
    if record.steps is not None:
        yield "Times", figures.step_times(record.steps)
    if record.run:
        yield "Run", str(record.run + 1)
    if spec.restarts:
        by_rank = ", ".join(f"rank {r}: {n}" for r, n in sorted(record.restarts.items()))
        made = sum(record.restarts.values())
        yield "Restarts", f"{made} of {spec.restarts}" + (f" ({by_rank})" if by_rank else "")
    if record.traffic is not None:
        yield "Sends", figures.traffic(record.traffic)
    if place := gpus.place(record):
        yield "Node", place
    if record.cluster:
        yield "Cluster", record.cluster
    if progress is not None:
        yield from _going(progress, ended)
    if record.optimizer_state_lost:
        yield (
            "Lost",
            "optimiser state, with an aggregator: a part of it, or all, began anew at 0",
        )


def _size(record: JobRecord) -> str:
    """Say how many workers a job has, or is to have; empty: as it was submitted."""
    least, most = record.spec.workers_bounds
    bounds = f" (of {least} to {most})"
    asked = record.workers or record.spec.workers
    held = sum(number for _, number in record.allocation) // (record.spec.gpus_each or 1)
    if record.resizing:
        return f"{record.counted or held}, becoming {record.size_next or record.counted}{bounds}"
    if held and held != asked:
        return f"{held}, {asked} wanted{bounds}"
    return f"{asked}{bounds}"


def _gpus(record: JobRecord) -> Iterator[tuple[str, str]]:
    """Describe what the job asks of nodes beside slots, and what it had of it."""
    spec = record.spec
    if spec.gpus:
        yield "GPUs", gpus.asked(record)
    each = [f"{spec.cores:g} cores"] if spec.cores else []
    each += [f"{human(spec.memory_bytes)} of memory"] if spec.memory_bytes else []
    if each:
        yield "Each process", ", ".join(each)
    if spec.batch_size:
        bounds = (spec.batch_min or spec.batch_size, spec.batch_max or spec.batch_size)
        yield (
            "Batch",
            f"{spec.batch_size}"
            + (f", from {bounds[0]} to {bounds[1]}" if bounds[0] < bounds[1] else "")
            + (f", {spec.batch}" if spec.batch else ""),
        )
    if spec.priority:
        yield "Priority", str(spec.priority)
    if spec.checkpoint:
        yield "Checkpoints", spec.checkpoint
    if spec.save_to:
        part = f", {spec.save_fraction:g} of it at a time" if spec.save_fraction < 1.0 else ""
        part += ", twice that as bfloat16" if spec.save_dtype == "bfloat16" else ""
        within = f"within {spec.save_every_s:g} s" if spec.save_every_s else "as often as it pays"
        yield "Saved", f"in {spec.save_to}, {within}{part}"
    if spec.recover == "rollback":
        yield "After a loss", f"it goes back to {record.mark or 'its begin: it has no mark yet'}"
    if record.begins_with:
        yield "Went back to", record.begins_with
    elif spec.start_from:
        yield "Begins with", f"the checkpoint in {spec.start_from}"
    if record.reallocations or record.reallocation_s:
        paused = f", paused {number_of(record.preemptions, 'time')} for others' sake"
        cost = f"; another one costs it {record.reallocation_s:.3g} s, as measured"
        yield (
            "Attempt",
            f"{record.attempt - record.run + 1}{paused if record.preemptions else ''}"
            f"{cost if record.reallocation_s else ''}",
        )


def _state(record: JobRecord, now_s: float) -> str:
    match record.state:
        case "pending":
            return f"pending, for {figures.lasted(now_s - record.submitted_s)}"
        case "running":
            return f"running, for {figures.lasted(now_s - record.started_s)}"
        case "starting" | "stopping" | "paused" as state:
            return f"{state}, for {figures.lasted(now_s - record.since_s)}"
        case state:
            ended = f"{state}, {figures.lasted(now_s - record.finished_s)} ago"
            ran_s = record.finished_s - record.started_s
            return f"{ended}, after {figures.lasted(ran_s)}" if record.started_s else ended


def _program(record: JobRecord) -> str:
    program = command_of(record.spec.program)
    if EMULATED in program:
        return "emulated: real messages and bytes, the computing is a wait"
    return shlex.join(program) if program else "started by its user"


def _going(progress: JobProgress, ended: bool) -> Iterator[tuple[str, str]]:
    where = ", ".join(sorted(progress.aggregators, key=tables.natural))
    if where:
        moved = f"; moved {number_of(progress.moves, 'time')}" if progress.moves else ""
        phase = f" ({progress.phase}{moved})" if progress.phase else ""
        yield "Aggregators", where + phase
    if progress.updated_s:
        parts = [figures.done(progress)]
        if not ended and progress.speed:
            parts.append(figures.speed(progress.speed))
        if not ended and progress.eta_s is not None:
            parts.append(figures.left(progress))
        yield "Progress", ", ".join(parts)
    if (program := progress.program) is not None:
        yield "Tasks", figures.program(program)
    if progress.loss is not None:
        yield "Loss", f"{figures.loss(progress.loss)} of its profiled speed"


def _ranks(record: JobRecord, progress: JobProgress | None, now_s: float) -> Iterator[Row]:
    heard = {rank.rank: rank for rank in progress.ranks} if progress is not None else {}
    if not heard and not record.results:
        return
    for number in range(record.spec.workers):
        rank, result = heard.get(number), record.results.get(str(number))
        cells = [str(number), "", "", ""]
        if rank is not None:
            batches = progress is None or progress.program is not None  # A host counts those.
            total = 0 if progress is None or batches else progress.iterations
            cells[1] = f"{rank.iteration:,}" + (f"/{total:,}" if total else "")
            cells[2] = figures.speed(rank.speed)
            cells[3] = f"{figures.lasted(now_s - rank.heard_s)} ago"
        ended = "" if result is None else (result or "done, without a result")
        yield Row(tuple(cells), ended)
