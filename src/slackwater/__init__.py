"""Slackwater puts a deep-learning cluster's slack to work.

What a training program imports is here; the system itself lives in the folders that
`schemas`, `common`, `services` and `loadgen` point to. All of it is loaded
when it is first asked for: importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackwater.agent import Agent
    from slackwater.agent.goodput import GoodputReporter
    from slackwater.common.domains.models.goodput import BatchLimits
    from slackwater.common.domains.models.gradient_noise import GradientSquares, NoiseScale

__all__ = ["Agent", "BatchLimits", "GoodputReporter", "GradientSquares", "NoiseScale"]


def __getattr__(name: str) -> Any:
    if name == "Agent":
        from slackwater.agent import Agent

        return Agent
    if name == "GoodputReporter":
        from slackwater.agent.goodput import GoodputReporter

        return GoodputReporter
    if name == "BatchLimits":
        from slackwater.common.domains.models.goodput import BatchLimits

        return BatchLimits
    if name in ("GradientSquares", "NoiseScale"):
        from slackwater.common.domains.models import gradient_noise

        return getattr(gradient_noise, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
