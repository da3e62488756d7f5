"""Slackwater puts a deep-learning cluster's slack to work.

What a training program imports is here; the system itself lives in the folders that
`schemas`, `common`, `services` and `loadgen` point to. `Agent` and `GoodputReporter` are loaded
when they are first asked for: importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackwater.agent import Agent
    from slackwater.agent.goodput import GoodputReporter
    from slackwater.common.domains.models.goodput import BatchLimits

__all__ = ["Agent", "BatchLimits", "GoodputReporter"]


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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
