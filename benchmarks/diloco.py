"""DiLoCo at shared aggregators beside torchft's, which reduces between the workers by gloo.

Two workers train the same model on the same batches from the same parameters, once as a job of a
cluster on this machine (`slackwater.torch.DiLoCo`), once by torchft's DiLoCo with its lighthouse
and managers. Both exchange the whole model, as float32, every `--every` steps; rounds alternate.
Compared: the seconds that an exchange adds to the steps, and the parameters at the end. The floor
is the copies of the model that an exchange cannot do without: each worker's out and in.

Then the same model is trained with changes of fewer bits: how much more is lost at the end, and how
many bytes a worker sends.

    python benchmarks/diloco.py [--width 512] [--every 10] [--exchanges 6] [--fragments 2]
        [--layers 8] [--rounds 3] [--json FILE]

torchft is not among the packages that are installed: `pip install torchft==0.2.0`.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figure, Row, Skipped, show, spread, write_json

from slackwater.client import AsyncClient
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster
from slackwater.schemas.jobs import JobSpec

WORKERS = 2
DIFFERENCE_MAX = 1e-5
RATIO_GOAL = 1.0
LOSS_GOAL = 1.02
FEWER_BITS = ("bfloat16", "int8")
LEARNED_EXCHANGES = 100


def made(width: int, depth: int) -> torch.nn.Sequential:
    torch.manual_seed(5)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def halves(model: torch.nn.Sequential, count: int) -> list[torch.nn.Module]:
    """Divide the model's layers into so many fragments."""
    size = len(model) // count
    return [model[at * size : (at + 1) * size] for at in range(count)]


def optimizers(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return inner, outer


def train(model: Any, step: Any, rank: int, steps: int, width: int) -> dict[str, Any]:
    """Train, and return each step's seconds and the parameters at the end."""
    seconds, losses = [], []
    for number in range(steps):
        drawn = torch.Generator().manual_seed(1000 * rank + number)
        inputs = torch.randn(16, width, generator=drawn)
        begun_s = time.perf_counter()
        model.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, 1))
        loss.backward()
        step()
        seconds.append(time.perf_counter() - begun_s)
        losses.append(loss.item())
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    lost = statistics.fmean(losses[-steps // 5 :])
    return {"seconds": seconds, "loss": lost, "parameters": flat.numpy().tobytes().hex()}


def ours(options: Any, rank: int) -> dict[str, Any]:
    from slackwater.torch import DiLoCo

    model = made(options.width, options.layers)
    inner, outer = optimizers(model)
    optimizer = DiLoCo(
        model, inner, outer, sync_every=options.every, gradient_dtype=options.dtype,
        fragments=halves(model, options.fragments),
    )  # fmt: skip
    found = train(model, optimizer.step, rank, options.every * options.exchanges, options.width)
    buckets = optimizer.agent._buckets
    found["sent_bytes"] = sum(
        bucket.bytes_of(at) for bucket in buckets for at in range(len(bucket.tensors))
    )
    optimizer.close()
    return found


def theirs(options: Any, rank: int) -> dict[str, Any]:
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = made(options.width, options.layers)
    inner, _ = optimizers(model)
    parts = halves(model, options.fragments)
    outers = [optimizers(part)[1] for part in parts]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)), min_replica_size=WORKERS,
        use_async_quorum=False, load_state_dict=model.load_state_dict,
        state_dict=model.state_dict, replica_id=f"r{rank}", store_addr="127.0.0.1",
        store_port=store.port, rank=0, world_size=1, lighthouse_addr=options.lighthouse,
        timeout=timedelta(seconds=30), init_sync=False,
    )  # fmt: skip
    with DiLoCo(manager, parts, inner, outers, sync_every=options.every):
        steps = options.every * options.exchanges
        found = train(model, inner.step, rank, steps, options.width)
    manager.shutdown(wait=False)
    return found


def program(options: Any) -> None:
    """Be one worker."""
    torch.set_num_threads(1)
    rank = options.rank if options.rank is not None else int(os.environ["SLACKWATER_RANK"])
    found = (theirs if options.worker == "theirs" else ours)(options, rank)
    (Path(options.out) / f"{options.worker}-{rank}.json").write_text(json.dumps(found))


def words_of(options: Any, worker: str, out: str, *more: str) -> list[str]:
    shape = [f"--{name}={getattr(options, name)}" for name in
             ("width", "layers", "every", "exchanges", "fragments", "dtype")]  # fmt: skip
    return [sys.executable, str(Path(__file__).resolve()), "--worker", worker, "--out", out,
            *shape, *more]  # fmt: skip


async def run_ours(options: Any, client: AsyncClient, out: str, number: int | str) -> None:
    id = f"apart-{number}"
    program = tuple(words_of(options, "ours", out))
    await client.submit(JobSpec(id=id, program=program, workers=WORKERS, servers=1))
    (ended,) = await client.wait(id, timeout_s=300.0)
    assert ended.state == "completed", ended


def run_theirs(options: Any, out: str) -> None:
    os.environ["RUST_LOG"] = "error"  # It tells each quorum else.
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=WORKERS)
    address = lighthouse.address().replace(socket.gethostname(), "127.0.0.1")
    try:
        workers = [
            subprocess.Popen(
                words_of(options, "theirs", out, f"--rank={rank}", f"--lighthouse={address}"),
                stderr=subprocess.DEVNULL,
            )
            for rank in range(WORKERS)
        ]
        codes = [worker.wait(timeout=300) for worker in workers]
        assert codes == [0] * WORKERS, codes
    finally:
        lighthouse.shutdown()


def read(out: str, worker: str, options: Any) -> tuple[float, np.ndarray]:
    """Return the seconds that an exchange adds on the slower worker, and rank 0's parameters."""
    added, parameters = [], np.zeros(0, np.float32)
    span = options.every // options.fragments
    for rank in range(WORKERS):
        found = json.loads((Path(out) / f"{worker}-{rank}.json").read_text())
        times = found["seconds"][span:]  # The first exchange makes connections.
        exchanged = [s for at, s in enumerate(times, span + 1) if at % span == 0]
        alone = statistics.median(s for at, s in enumerate(times, span + 1) if at % span)
        added.append((statistics.fmean(exchanged) - alone) * options.fragments)
        if rank == 0:
            parameters = np.frombuffer(bytes.fromhex(found["parameters"]), np.float32)
    return max(added), parameters


def floor_s(options: Any) -> float:
    """Return the seconds of copying the model twice."""
    source = np.ones(
        sum(p.numel() for p in made(options.width, options.layers).parameters()), np.float32
    )
    target = np.empty_like(source)
    np.copyto(target, source)
    begun_s = time.perf_counter()
    np.copyto(target, source)
    np.copyto(source, target)
    return time.perf_counter() - begun_s


async def with_fewer_bits(options: Any) -> list[Row]:
    """Train the same with changes of each dtype."""
    loss, sent_bytes = {}, {}
    cluster_options = ClusterOptions(controllers=1, aggregators=1)
    async with (
        EmbeddedCluster(cluster_options) as cluster,
        AsyncClient.connect(cluster.url) as client,
    ):
        for dtype in ("float32", *FEWER_BITS):
            asked = argparse.Namespace(**vars(options))
            asked.dtype, asked.exchanges = dtype, LEARNED_EXCHANGES
            asked.width, asked.layers = 64, 2
            with tempfile.TemporaryDirectory() as out:
                await run_ours(asked, client, out, dtype)
                found = json.loads((Path(out) / "ours-0.json").read_text())
            loss[dtype], sent_bytes[dtype] = found["loss"], found["sent_bytes"]
            print(f"{dtype}: {loss[dtype]:.6f} lost, {sent_bytes[dtype] / 1e3:.0f} kB an exchange")
    rows: list[Row] = []
    for dtype in FEWER_BITS:
        rows += [
            Figure(
                f"loss, changes in {dtype}", loss[dtype], loss["float32"], "1", "float32",
                LOSS_GOAL, lower_is_better=True,
            ),
            Figure(
                f"sent in an exchange, {dtype}", sent_bytes[dtype] / 1e3,
                sent_bytes["float32"] / 1e3, "kB", "float32", 0.51, lower_is_better=True,
            ),
        ]  # fmt: skip
    return rows


async def measured(options: Any) -> list[Row]:
    ours_s, theirs_s, floors_s, differences = [], [], [], []
    cluster_options = ClusterOptions(controllers=1, aggregators=1)
    async with (
        EmbeddedCluster(cluster_options) as cluster,
        AsyncClient.connect(cluster.url) as client,
    ):
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as out:
                await run_ours(options, client, out, number)
                await asyncio.to_thread(run_theirs, options, out)
                mine_s, mine = read(out, "ours", options)
                other_s, other = read(out, "theirs", options)
            ours_s.append(mine_s)
            theirs_s.append(other_s)
            floors_s.append(floor_s(options))
            differences.append(float(np.abs(mine - other).max()))
            print(
                f"round {number + 1}: {mine_s * 1e3:.1f} ms an exchange here, "
                f"{other_s * 1e3:.1f} ms by torchft; parameters differ by {differences[-1]:.1e}"
            )
    pairs = list(zip(ours_s, theirs_s, strict=True))
    return [
        Figure(
            "exchange of the whole model", 1e3 * statistics.median(ours_s),
            1e3 * statistics.median(theirs_s), "ms", "torchft, gloo", RATIO_GOAL,
            lower_is_better=True, floor=1e3 * statistics.median(floors_s),
            spread=spread(ours_s), ratios=tuple(a / b for a, b in pairs),
        ),
        Figure(
            "largest difference of a parameter", max(differences), DIFFERENCE_MAX, "1",
            "what rounding explains", 1.0, lower_is_better=True,
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("width", 512), ("every", 10), ("exchanges", 6), ("fragments", 2),
                          ("layers", 8), ("rounds", 3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", choices=("ours", "theirs"))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.worker:
        program(options)
        return
    if importlib.util.find_spec("torchft") is None:
        why = "torchft is not installed: pip install torchft==0.2.0"
        rows: list[Row] = [Skipped("DiLoCo beside torchft", why)]
    else:
        rows = asyncio.run(measured(options))
    rows += asyncio.run(with_fewer_bits(options))
    show("DiLoCo, two workers", rows)
    if options.json:
        write_json(options.json, "python benchmarks/diloco.py", rows)


if __name__ == "__main__":
    main()
