"""Slackwater puts a deep-learning cluster's slack to work.

What a training program imports is here, and the client of a cluster; the system itself lives in the
folders that `schemas`, `common`, `services` and `loadgen` point to. All of it is loaded when it is
first asked for: importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from slackwater.agent import Agent
    from slackwater.agent.goodput import GoodputReporter
    from slackwater.client import AsyncClient, Client
    from slackwater.common.domains.models.goodput import BatchLimits
    from slackwater.common.domains.models.gradient_noise import GradientSquares, NoiseScale
    from slackwater.schemas.jobs import JobSpec

__all__ = [
    "Agent",
    "AsyncClient",
    "BatchLimits",
    "Client",
    "GoodputReporter",
    "GradientSquares",
    "JobSpec",
    "NoiseScale",
]
_HOMES: Final = {
    "Agent": "slackwater.agent",
    "AsyncClient": "slackwater.client",
    "BatchLimits": "slackwater.common.domains.models.goodput",
    "Client": "slackwater.client",
    "GoodputReporter": "slackwater.agent.goodput",
    "GradientSquares": "slackwater.common.domains.models.gradient_noise",
    "JobSpec": "slackwater.schemas.jobs",
    "NoiseScale": "slackwater.common.domains.models.gradient_noise",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
