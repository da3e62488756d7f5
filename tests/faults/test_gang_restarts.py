"""kill -9 of a rank of a DistributedDataParallel job: the gang meets again and ends as if nothing
had happened.

Real processes. Some ten seconds: two ranks import torch, once more after the kill, unless the warm
process of their node had it already.
"""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from tests.faults.gpu_nodes import gpu_nodes

from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make setup-torch)")

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

STEPS = 60
TRAIN = """
import hashlib, sys, time
import torch
import slackwater.torch

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
state = slackwater.torch.checkpoint(
    folder=sys.argv[1], interval_s=0.2, model=model, optimizer=optimizer
)
for step in state.steps(STEPS):
    generator = torch.Generator().manual_seed(2 * step + rank)
    batch = torch.randn(8, 16, generator=generator)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
    print("step", step, flush=True)
values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("ended at", hashlib.sha256(values).hexdigest(), flush=True)
"""


@pytest.mark.parametrize(("machines", "gpus"), [(2, 2), (1, 0)])
async def test_a_ddp_gang_whose_ranks_are_killed_ends_at_the_undisturbed_bits(
    tmp_path: Path, machines: int, gpus: int
) -> None:
    """On a GPU of each of two nodes, and in two slots of one."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("STEPS", str(STEPS)))
    rng, killed, digests = random.Random(4), 0, {}
    async with gpu_nodes(machines, 1) as nodes:
        for id, kills in (("calm", 0), ("killed", 2)):
            program = ("python", str(script), str(tmp_path / id))
            spec = JobSpec(
                id=id, workers=2, gpus=gpus, iterations=STEPS, program=program, restarts=3,
                aggregate="off",
            )  # fmt: skip
            await nodes.client.submit(spec)
            attempt = 0
            async with asyncio.timeout(180):
                while (record := await nodes.client.job(id)).state not in TERMINAL_STATES:
                    await asyncio.sleep(rng.uniform(0.3, 0.6))
                    ranks = nodes.running(id)
                    logs = [nodes.state_dir(r.node) / f"jobs/{id}/rank{r.rank}.log" for r in ranks]
                    trains = len(logs) == 2 and all("step" in log.read_text() for log in logs)
                    if attempt < kills and trains and all(r.attempt == attempt for r in ranks):
                        os.kill(rng.choice(ranks).pid, signal.SIGKILL)
                        attempt, killed = attempt + 1, killed + 1
            assert record.state == "completed", record.reason
            assert (record.attempt, sum(record.restarts.values())) == (attempt, attempt)
            logs = [
                nodes.state_dir(node) / f"jobs/{id}/rank{rank}.log"
                for rank, node in enumerate(("w1", f"w{machines}"))
            ]
            said = {log.read_text().rsplit("ended at ", 1)[-1] for log in logs}
            (digests[id],) = said
    assert killed == 2
    assert digests["killed"] == digests["calm"]
