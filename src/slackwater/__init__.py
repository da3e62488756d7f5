"""Slackwater puts a deep-learning cluster's slack to work.

What a training program imports is here; the system itself lives in the folders that
`schemas`, `common`, `services` and `loadgen` point to. `Agent` is loaded when it is first asked
for: importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackwater.agent import Agent

__all__ = ["Agent"]


def __getattr__(name: str) -> Any:
    if name == "Agent":
        from slackwater.agent import Agent

        return Agent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
