"""`slackwater model`: the performance models by hand.

slackwater model throughput --worker-s .029 --server-s .018 --uplink-s .072 --downlink-s .072
    --workers 6 --method hybrid
slackwater model configure --instances 1e6 --batch 1000 --model-bytes 2.5e8
    --machines 32 --instance-s .001 --bytes-per-s 1e9 --now-workers 27
slackwater model configure ... --machine 28x.0006:1.6e8 --machine 4x.00025:6.3e8
slackwater model rework --contraction .9 --perturbation 20:.1
slackwater model rework --contraction .99 --iteration-s .5 --checkpoint-s 10 --failures-per-h 1
    --lost .25
"""

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from slackwater.common.base import limits
from slackwater.console.options import Json
from slackwater.console.outcome import USAGE, Usage, out, print_json, reported
from slackwater.console.program import group
from slackwater.console.usage import shown

if TYPE_CHECKING:  # They load numpy and scipy: seconds on a cold machine, for a --help.
    from slackwater.common.domains.models.cost import Configuration, Machine
    from slackwater.common.domains.models.queueing import Method, Solution, StepTimes

app = group("Predict the throughput of asynchronous SGD, the best configuration, or rework.")


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise Usage(f"{option} is {text!r}; give a number, or one per worker: .03,.03,.2") from None


def _steps(times: dict[str, str], workers: int) -> "list[StepTimes]":
    """One entry per worker; a single number stands for all workers."""
    from slackwater.common.domains.models.queueing import StepTimes

    columns = {name: _numbers(text, f"--{name.replace('_', '-')}") for name, text in times.items()}
    longest = max(len(column) for column in columns.values())
    count = workers or longest
    for name, column in columns.items():
        if len(column) not in (1, count):
            raise Usage(
                f"--{name.replace('_', '-')} has {len(column)} values for {count} workers; give "
                "one, or one per worker"
            )
    full = {name: c * count if len(c) == 1 else c for name, c in columns.items()}
    return [StepTimes(**{name: c[i] for name, c in full.items()}) for i in range(count)]


@app.command()
def throughput(
    worker_s: Annotated[
        str, typer.Option(help="Seconds to compute a gradient; or one per worker: a,b,c.")
    ],
    server_s: Annotated[
        str, typer.Option(help="Seconds to apply it at the server; exact if alike for all workers.")
    ] = "0",
    uplink_s: Annotated[str, typer.Option(help="Seconds to send it over a free link.")] = "0",
    downlink_s: Annotated[
        str, typer.Option(help="Seconds to fetch the parameters over a free link.")
    ] = "0",
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=limits.MODEL_WORKERS_MAX,
            help="Number of workers (0: as many as --worker-s gives times).",
        ),
    ] = 0,
    servers: Annotated[int, typer.Option(min=1, help="Parameter servers; they share evenly.")] = 1,
    shares: Annotated[
        str, typer.Option(help="Share of the bytes on each server, where uneven: .67,.17,.16.")
    ] = "",
    method: Annotated[
        str, typer.Option(help="How transfers share a link: exact, fcfs or hybrid.")
    ] = "exact",
    overlap_above: Annotated[
        float,
        typer.Option(
            help="Utilisation above which transfers overlap on a link, if hybrid (eq. 4)."
        ),
    ] = 0.8,
    json: Json = False,
) -> None:
    """Predict mini-batches per second of asynchronous SGD with a parameter server (Lin et al.)."""
    from slackwater.common.domains.models.queueing import sharing_above, solve

    with reported(rejected=USAGE):
        if not 0 <= overlap_above < 1:
            raise Usage(f"--overlap-above {overlap_above}: give a number from 0 to below 1")
        times = {"worker_s": worker_s, "server_s": server_s, "uplink_s": uplink_s,
                 "downlink_s": downlink_s}  # fmt: skip
        steps = _steps(times, workers)
        chosen = cast("Method", method)  # Checked by solve.
        parts = _numbers(shares, "--shares") if shares else []
        sharing = sharing_above(overlap_above)
        solution = solve(steps, chosen, servers=servers, shares=parts, sharing=sharing)
        alone = solve(steps[:1], chosen, servers=servers, shares=parts).throughput
        if json:
            print_json(_throughput_document(solution, len(parts) or servers, alone))
        else:
            _show_throughput(solution, alone)


def _throughput_document(solution: "Solution", servers: int, alone: float) -> dict[str, Any]:
    return {
        "workers": solution.workers,
        "servers": servers,
        "method": solution.method,
        "solver": solution.solver,
        "approximate": bool(solution.approximation),
        "approximation": solution.approximation,
        "throughput": solution.throughput,
        "speedup": solution.throughput / alone,
        "utilization": dict(solution.utilization),
        "worker_throughput": list(solution.worker_throughput),
    }


def _show_throughput(solution: "Solution", alone: float) -> None:
    by = f"method {solution.method}, by {solution.solver}"
    table = Table(title=f"{solution.workers} workers, {by}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("throughput [mini-batches/s]", f"{solution.throughput:.6g}")
    table.add_row("speed-up over the first worker alone", f"{solution.throughput / alone:.4g}")
    for station, busy in solution.utilization.items():
        table.add_row(f"utilisation of {station}", f"{busy:.4f}")
    out.print(table)
    if solution.approximation:
        out.print(f"approximate: {solution.approximation}")


_ServerS = Annotated[
    float, typer.Option(help="Seconds that each server costs a worker in each mini-batch.")
]
_Blocks = Annotated[
    int,
    typer.Option(min=1, max=limits.MODEL_BLOCKS_MAX, help="Blocks in which the data moves."),
]
_Whole = Annotated[
    bool, typer.Option(help="A worker's last mini-batch takes as long as a full one (eq. 3.4).")
]


@app.command()
def configure(
    instances: Annotated[float, typer.Option(help="D: training instances of an epoch.")],
    batch: Annotated[float, typer.Option(help="B: instances of a worker's mini-batch.")],
    model_bytes: Annotated[float, typer.Option(help="M: bytes of the model.")],
    machines: Annotated[
        int,
        typer.Option(min=0, max=limits.MODEL_MACHINES_MAX, help="Number of machines, all alike."),
    ] = 0,
    instance_s: Annotated[
        float, typer.Option(help="Seconds that a worker takes per instance (the paper's c).")
    ] = 0,
    bytes_per_s: Annotated[
        float, typer.Option(help="Bytes per second of a link (the paper's b).")
    ] = 0,
    server_s: _ServerS = 0,
    whole_batches: _Whole = False,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            help="A kind of machine as COUNTxINSTANCE_S:BYTES_PER_S; repeat for each kind."
        ),
    ] = None,
    now_workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=limits.MODEL_MACHINES_MAX,
            help="Present number of workers, on machines alike: says whether a change is worth it.",
        ),
    ] = 0,
    blocks: _Blocks = limits.MODEL_BLOCKS,
    time_limit_s: Annotated[
        float, typer.Option(help="Search for at most this many seconds, where machines differ.")
    ] = limits.MODEL_TIME_LIMIT_S,
    json: Json = False,
) -> None:
    """Find the workers, servers and shares with the shortest epoch (Cruise)."""
    with reported(rejected=USAGE):
        kinds = [_kind(text) for text in machine or ()]
        if bool(kinds) == bool(machines):
            raise Usage("give either --machines with their times, or --machine for each kind")
        if not kinds:
            kinds = [_machines(machines, instance_s, bytes_per_s)]
        different = len({kind for _, kind in kinds}) > 1
        if different and now_workers:
            raise Usage("--now-workers is for machines alike; leave it out")
        numbers: dict[str, Any] = {
            "instances": instances, "batch": batch, "model_bytes": model_bytes,
            "server_s": server_s, "whole_batches": whole_batches,
        }  # fmt: skip
        if different:
            document = _of_different(numbers, kinds, blocks, time_limit_s)
        else:
            document = _of_alike(numbers, kinds, now_workers)
        if json:
            print_json(document)
        else:
            _show_configuration(document)


def _of_different(
    numbers: dict[str, Any], kinds: "list[tuple[int, Machine]]", blocks: int, limit_s: float
) -> dict[str, Any]:
    from slackwater.common.domains.models.cost import Training
    from slackwater.common.domains.models.cost_kinds import KINDS_MAX, kinds_optimum
    from slackwater.common.domains.models.cost_programme import check_search, different_optimum

    check_search(blocks, limit_s)
    cluster = [kind for count, kind in kinds for _ in range(count)]
    if len(set(cluster)) <= KINDS_MAX:
        best = kinds_optimum(Training(**numbers), cluster)
        return _configuration_document(best, "by-kind", None)
    found = different_optimum(Training(**numbers), cluster, blocks=blocks, time_limit_s=limit_s)
    return _configuration_document(found, "milp", None)


def _of_alike(
    numbers: dict[str, Any], kinds: "list[tuple[int, Machine]]", now_workers: int
) -> dict[str, Any]:
    from slackwater.common.domains.models import cost

    training, alike = cost.Training(**numbers), kinds[0][1]
    count = sum(number for number, _ in kinds)
    found = cost.even_optimum(training, alike, count)
    gain = None
    if now_workers:
        now = cost.even_configuration(training, alike, count, now_workers)
        gain = (1 - found.epoch_s / now.epoch_s, cost.pays(now.epoch_s, found.epoch_s))
    return _configuration_document(found, "closed-form", gain)


def _machines(count: int, instance_s: float, bytes_per_s: float) -> "tuple[int, Machine]":
    from slackwater.common.domains.models.cost import Machine

    return count, Machine(instance_s, bytes_per_s)


def _kind(text: str) -> "tuple[int, Machine]":
    count, cross, times = text.partition("x")
    try:
        instance_s, rate = map(float, times.split(":"))
        number = int(count)
    except ValueError:
        number, cross = 0, ""
    if not cross or number < 1:
        raise Usage(f"--machine {text!r}: write COUNTxINSTANCE_S:BYTES_PER_S, as 28x.001:1.6e8")
    if number > limits.MODEL_MACHINES_MAX:
        raise Usage(
            f"--machine {shown(text)}: give at most {limits.MODEL_MACHINES_MAX:,} of a kind"
        )
    return _machines(number, instance_s, rate)


def _configuration_document(
    found: "Configuration", solver: str, gain: tuple[float, bool] | None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "workers": found.worker_count,
        "servers": found.server_count,
        "epoch_s": found.epoch_s,
        "solver": solver,
        "proven": found.proven,
        "machines": [
            {"role": "worker" if worker else "server", "instances": data, "model_bytes": held}
            for worker, data, held in zip(
                found.workers, found.instances, found.model_bytes, strict=True
            )
        ],
    }
    if gain is not None:
        document["gain"], document["reconfigure"] = gain
    return document


def _show_configuration(document: dict[str, Any]) -> None:
    out.print(
        f"{document['workers']} workers, {document['servers']} servers: an epoch takes "
        f"{document['epoch_s']:.6g} s ({document['solver']}"
        + (")" if document["proven"] else ", time ran out before this was proven the best)")
    )
    if "gain" in document:
        verdict = "worth" if document["reconfigure"] else "not worth"
        out.print(f"{document['gain']:.1%} shorter than now: {verdict} a change (5 % rule)")
    table = Table()
    for column in ("machines", "role", "instances each", "model bytes each"):
        table.add_column(column, justify="left" if column == "role" else "right")
    same: dict[tuple[str, float, float], int] = {}
    for entry in document["machines"]:
        key = (entry["role"], entry["instances"], entry["model_bytes"])
        same[key] = same.get(key, 0) + 1
    for (role, data, held), count in same.items():
        table.add_row(str(count), role, f"{data:,.6g}", f"{held:,.6g}")
    out.print(table)


@app.command()
def rework(
    contraction: Annotated[
        float,
        typer.Option(help="Factor by which an iteration shortens the way to the optimum (c)."),
    ],
    distance: Annotated[
        float, typer.Option(help="Distance from the optimum at the begin, |w0 - w*|.")
    ] = 1.0,
    perturbation: Annotated[
        list[str] | None,
        typer.Option(help="A perturbation as ITERATION:NORM; repeat for each (eq. 5.6)."),
    ] = None,
    each: Annotated[
        float | None, typer.Option(help="The norm of a perturbation in every iteration (eq. B.2).")
    ] = None,
    accuracy: Annotated[
        float, typer.Option(help="Distance from the optimum at which training ends, with --each.")
    ] = 0.0,
    iteration_s: Annotated[
        float | None,
        typer.Option(help="Seconds of an iteration: asks for the best interval of checkpoints."),
    ] = None,
    checkpoint_s: Annotated[
        float, typer.Option(help="Seconds that a checkpoint takes from training.")
    ] = 0.0,
    failures_per_h: Annotated[
        float, typer.Option(help="Failures an hour, of whatever loses parameters.")
    ] = 0.0,
    lost: Annotated[float, typer.Option(help="The part of the parameters that one takes.")] = 1.0,
    recovery_s: Annotated[
        float, typer.Option(help="Seconds from a failure until training goes on.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Bound the iterations that faults cost, or find the interval of checkpoints (SCAR)."""
    from slackwater.common.domains.models import rework as models

    with reported(rejected=USAGE):
        if (perturbation, each, iteration_s).count(None) != 2:
            raise Usage("give one of --perturbation, --each and --iteration-s")
        if perturbation is not None:
            some = [models.Perturbation(*_perturbation(text)) for text in perturbation]
            document = {"rework_iterations": models.rework_bound(contraction, distance, some)}
        elif each is not None:
            bound = models.endless_rework_bound(contraction, distance, each, accuracy)
            document = {"rework_iterations": bound}
        else:
            assert iteration_s is not None
            per_s = failures_per_h / 3600.0
            found = models.best_interval(
                contraction, iteration_s, checkpoint_s, per_s, lost, recovery_s
            )
            document = found._asdict()
        if json:
            print_json(document)
        else:
            _show_rework(document)


def _perturbation(text: str) -> tuple[int, float]:
    iteration, _, norm = text.partition(":")
    try:
        return int(iteration), float(norm)
    except ValueError:
        raise Usage(f"--perturbation {shown(text)}: write ITERATION:NORM, as 20:.1") from None


def _show_rework(document: dict[str, float]) -> None:
    if "period_s" not in document:
        out.print(f"at most {document['rework_iterations']:.4g} iterations more")
        return
    out.print(
        f"a checkpoint every {document['period_s']:.4g} s ({document['iterations']:.4g} "
        f"iterations): {document['overhead']:.2%} of the time goes into checkpoints, rework and "
        f"recovery; a failure costs {document['rework_s']:.4g} s of rework on average, at most"
    )
