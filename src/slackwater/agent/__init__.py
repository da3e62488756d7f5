"""The Agent library: what a training program has of Slackwater (Gu et al. 2021, section 3.1).

`client` is the interface, `cells` the program's view of buckets, `attached` the regions behind
them, `session` the thread that talks, `core` what it decides.
"""

from slackwater.agent.client import Agent

__all__ = ["Agent"]
