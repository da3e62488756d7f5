"""The Agent library: what a training program has of Slackwater (Gu et al. 2021, section 3.1).

`client` is the interface, `worker_bucket` the program's view of a bucket, `region_access` the
regions behind it, `session` the thread that talks to aggregators, `core` what it decides;
`goodput` tells the cluster how well a job trains, whatever it synchronises by. Commands read what
programs left (`journal`): they load no numpy for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackwater.agent.client import Agent

__all__ = ["Agent"]


def __getattr__(name: str) -> Any:
    if name == "Agent":
        from slackwater.agent.client import Agent

        return Agent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
