"""`slackwater submit`: hand a job to the cluster."""

import re
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from slackwater.cli.attending import attend
from slackwater.cli.job_file import read_job
from slackwater.cli.naming import new_id, said
from slackwater.cli.options import Json, Url
from slackwater.cli.outcome import err, out, print_json, reported
from slackwater.cli.show import with_client
from slackwater.common.client import Client
from slackwater.common.errors import Rejected
from slackwater.loadgen.replay.workload import COMPUTE_S, emulated
from slackwater.schemas.base import ID_PATTERN
from slackwater.schemas.jobs import Consistency, JobSpec

ITERATIONS: Final = 100
"""Of an emulated job that is given no number."""
Id = Annotated[
    str,
    typer.Option(help="The job's id; submitted again it changes nothing. By default one is made."),
]
Iterations = Annotated[
    int | None,
    typer.Option(min=1, help="Of an emulation 100 by default; a program may count for itself."),
]

Wait = Annotated[
    bool, typer.Option("--wait", help="Print its logs until it ends, and exit as it did.")
]


def submit(
    id: Id = "",
    program: Annotated[
        list[str] | None,
        typer.Argument(help="The command that each worker runs, after --, as its node finds it."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="An emulated network, e.g. vgg19.")] = None,
    file: Annotated[Path | None, typer.Option(help="A JobSpec as JSON instead.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64)] = 2,
    servers: Annotated[int, typer.Option(min=1, max=64)] = 2,
    iterations: Iterations = None,
    compute_s: Annotated[
        float | None, typer.Option(help="Seconds of computing per iteration.")
    ] = None,
    bytes_scale: Annotated[float, typer.Option(help="Share of the real tensors' sizes.")] = 0.2,
    consistency: Annotated[
        Consistency,
        typer.Option(help="When a gradient is applied, and whom a worker waits for."),
    ] = "synchronous",
    staleness: Annotated[
        int, typer.Option(min=0, max=1000, help="Of stale-synchronous: iterations ahead, at most.")
    ] = 0,
    tenant: Annotated[str, typer.Option(help="On whose account it runs.")] = "",
    seed: int = 0,
    wait: Wait = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job; returns once it is stored, with --wait once it has ended: with 0, or the exit
    code of the first rank that failed (1: by a signal, or cancelled). Ctrl-C leaves it running."""
    id = id or ("" if file is not None else new_id(model, program))
    with reported():
        if file is not None:
            spec = _from_file(file, id)
        elif program:
            spec = JobSpec(
                id=id, model=model or "", workers=workers, servers=servers, seed=seed,
                iterations=iterations or 1, program=tuple(program),
                consistency=consistency, staleness=staleness,
            )  # fmt: skip
        elif model is not None:
            spec = emulated(
                id,
                model,
                workers=workers,
                servers=servers,
                iterations=iterations or ITERATIONS,
                compute_s=compute_s if compute_s is not None else COMPUTE_S.get(model, 1.0),
                bytes_scale=bytes_scale,
                seed=seed,
                consistency=consistency,
                staleness=staleness,
            )
        else:
            raise Rejected("nothing to submit: give --model NAME, --file SPEC.json or -- PROGRAM")
        if tenant:
            spec = msgspec.structs.replace(spec, tenant=tenant)
        _check(spec, bytes_scale, compute_s)
    _store(spec, url, json, wait)


def _store(spec: JobSpec, url: str | None, json: bool, wait: bool) -> None:
    if wait:
        code = with_client(url, lambda client: _attended(client, spec, json))
        if code:
            raise typer.Exit(code)
        return
    known = with_client(url, lambda client: client.submit(spec))
    if json:
        print_json(spec)
    else:
        out.print(said(spec, known), markup=False, highlight=False, soft_wrap=True)


async def _attended(client: Client, spec: JobSpec, json: bool) -> int:
    known = await client.submit(spec)
    err.print(said(spec, known), markup=False)
    return await attend(client, spec, json)


def _from_file(file: Path, id: str) -> JobSpec:
    """Raises Rejected."""
    spec = read_job(file)
    if id and spec.id != id:
        raise Rejected(f"--id {id}: {file} says id {spec.id}; use one id")
    return spec


def _check(spec: JobSpec, bytes_scale: float, compute_s: float | None) -> None:
    """What would only fail once the job runs, or at the master. Raises Rejected."""
    if re.fullmatch(ID_PATTERN, spec.id) is None:
        raise Rejected(
            f"--id {spec.id!r}: an id has letters, digits, - and _, at most 63 in all, and begins "
            "with a letter or digit"
        )
    if len(spec.tenant) > 64:
        raise Rejected(f"--tenant: a name has at most 64 characters, this one {len(spec.tenant)}")
    if not 0 < bytes_scale <= 1:
        raise Rejected(f"--bytes-scale {bytes_scale:g}: give a number above 0 and at most 1")
    if compute_s is not None and compute_s < 0:
        raise Rejected(f"--compute-s {compute_s:g}: give 0 or more seconds")
