"""How an Agent's job synchronises: through how many aggregators, with how many bytes of gradient.

A reporter of goodput that is given an Agent fits the throughput of aggregation
(common/domains/models/shared_throughput.py) in place of all-reduce's.
"""

from slackwater.agent.client import Agent
from slackwater.agent.session import Session
from slackwater.common.domains.models.shared_throughput import Carried


def carried(agent: Agent) -> Carried:
    """Return the bytes of one worker's whole gradient. The link's rate is not known."""
    buckets = agent._buckets
    sizes = (each.bytes_of(at) for each in buckets for at in range(len(each.gradients)))
    return Carried(float(max(1, sum(sizes))))


def aggregators(agent: Agent) -> int:
    """Count the aggregators that have the job's tensors now; at least 1."""
    session = agent._session
    return max(1, len(session._core.aggregators)) if isinstance(session, Session) else 1
