"""The PyTorch binding: three changed lines make an ordinary training script a worker of a job.

    import slackwater.torch

    model = ...
    optimizer = slackwater.torch.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    sampler = DistributedSampler(dataset, slackwater.torch.size(), slackwater.torch.rank())

`rules` says what a torch optimiser is in terms of ours, `tensors` how a parameter and its gradient
lie in the job's regions, `optimizer` when which is pushed and pulled; `elastic` trains to the same
bits on any number of workers. Two are apart from all that:
`training_state` keeps checkpoints of scripts that exchange gradients in another way (`checkpoint`),
`prepared` is a data set whose samples are prepared once. `adaptive` chooses a program's batch and
scales its rate. `diloco` lets workers train apart and meet now and then.
"""

from typing import TYPE_CHECKING, Any

from slackwater.agent.identity import rank_of, workers_of
from slackwater.torch.elastic import Elastic
from slackwater.torch.optimizer import Optimizer
from slackwater.torch.training_state import checkpoint

if TYPE_CHECKING:
    from slackwater.torch.adaptive import Adaptive
    from slackwater.torch.diloco import DiLoCo
    from slackwater.torch.prepared import Prepared

DistributedOptimizer = Optimizer

__all__ = [
    "Adaptive",
    "DiLoCo",
    "DistributedOptimizer",
    "Elastic",
    "Optimizer",
    "Prepared",
    "checkpoint",
    "rank",
    "size",
]


def __getattr__(name: str) -> Any:
    """Loaded when it is used: most programs need neither remote memory nor another batch."""
    if name == "Adaptive":
        from slackwater.torch.adaptive import Adaptive

        return Adaptive
    if name == "DiLoCo":
        from slackwater.torch.diloco import DiLoCo

        return DiLoCo
    if name == "Prepared":
        from slackwater.torch.prepared import Prepared

        return Prepared
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def rank() -> int:
    """Return this process's rank among the job's workers; 0 outside a job."""
    return rank_of()


def size() -> int:
    """Return the number of the job's workers; 1 outside a job."""
    return workers_of()
