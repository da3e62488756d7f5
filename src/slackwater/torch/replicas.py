"""The replicas of an adaptive program: rank 0 decides, all of them train alike."""

import os
from typing import Any

import torch
import torch.distributed as dist

from slackwater.agent.goodput import placement_of
from slackwater.agent.goodput_report import GPUS
from slackwater.agent.identity import JOB, plainly, rank_of, workers_of
from slackwater.common.domains.models.adaptive_batch import Decision
from slackwater.schemas.base import JobId


class Replicas:
    """All ranks of torch.distributed; one alone without it."""

    def __init__(self) -> None:
        """Called by all ranks at once. Raises Rejected for several workers that cannot agree."""
        self.rank, self.number = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.number = dist.get_rank(), dist.get_world_size()
        elif workers_of() > 1:
            raise plainly(
                f"rank {rank_of()} of {workers_of()} adapts its batch before "
                'torch.distributed.init_process_group("gloo"), by which ranks agree on it: call '
                "that first"
            )
        # Not the group that trains: NCCL's would wait for the GPU.
        self._group = dist.new_group(backend="gloo") if self.number > 1 else None

    @property
    def job(self) -> JobId:
        """The job that this program is of; empty outside one."""
        return JobId(os.environ.get(JOB, ""))

    @property
    def attempt(self) -> int:
        """The job's attempt that this program is of."""
        return placement_of(os.environ, self.number).attempt

    @property
    def nodes(self) -> int:
        """Machines that the replicas are on, as the worker service or torchrun says."""
        found = placement_of(os.environ, self.number).nodes
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if GPUS not in os.environ and local.isdigit() and int(local):
            found = -(-self.number // int(local))
        return min(found, self.number)

    def agree(self, decision: Decision, every: int) -> tuple[Decision, int]:
        """Return rank 0's decision, and the iterations until they agree again."""
        if self._group is None:
            return decision, every
        values = torch.tensor([*decision, every], dtype=torch.float64)
        dist.broadcast(values, 0, self._group)
        per_gpu, accumulation, rate, efficiency, every = values.tolist()
        return Decision(int(per_gpu), int(accumulation), rate, efficiency), int(every)

    def mean(self, value: float) -> float:
        """Return the mean of all replicas' values."""
        if self._group is None:
            return value
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, group=self._group)
        return float(values) / self.number

    def check(self, world: Any) -> None:
        """Check that a model's process group has all ranks. Raises Rejected."""
        if dist.get_world_size(world) != self.number:
            raise plainly(
                f"the model's process group has {dist.get_world_size(world)} of {self.number} "
                "ranks; an adaptive program has all of them train one model"
            )
