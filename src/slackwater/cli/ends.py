"""Foretell when a job with GPUs will end: the simulator goes on from the running cluster."""

from typing import Final

import msgspec

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell.client import Client
from slackwater.console import figures
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo

FORETOLD_MAX = 2000
"""Active jobs of a cluster for which ends are foretold: more take seconds to play."""


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one job as it is foretold. Jobs that are submitted later are not foreseen."""

    ends_s: float | None = None
    """Seconds from now on; None: nothing can be foretold, `why` says why."""
    policy: str = ""
    """The policy that the cluster has."""
    assumed: bool = False
    """It does not tell how much work it has left, and is taken to need as long as others did."""
    why: str = ""

    def said(self) -> str:
        if self.ends_s is None:
            return f"not known: {self.why}"
        basis = ", if it needs as long as jobs that ended" if self.assumed else ""
        return f"in about {figures.lasted(self.ends_s)}, foretold under {self.policy}{basis}"


async def foretold(client: Client, record: JobRecord) -> Ends | None:
    """Return None for a job without GPUs, and for one that has ended."""
    if not record.spec.gpus or record.state in TERMINAL_STATES:
        return None
    if record.held:
        return Ends(why="it waits until its user lets it go on")
    policy = await client.master("policy", GetPolicy(), PolicyInfo)
    records, progress = await client.all_jobs()
    active = sum(each.state not in TERMINAL_STATES for each in records.values())
    if active > FORETOLD_MAX:
        return Ends(why=f"{active} jobs are active, and at most {FORETOLD_MAX} are played")
    nodes, now_s = await client.nodes(), client.clock.now_s()

    from slackwater.loadgen.simulator.gpu.what_if import forecast  # It loads numpy.

    try:
        told = forecast(records.values(), progress, nodes, now_s, policy)
    except ConfigRejected as error:
        return Ends(why=str(error))
    id = record.spec.id
    if id not in told.ends_s:
        return Ends(why="it cannot start on the nodes and with the quotas of now")
    if told.assumed and not told.compared:
        who = "it does" if id in told.assumed else f"{len(told.assumed)} other jobs do"
        return Ends(why=f"{who} not tell {_TELL}, and no job has ended to compare with")
    return Ends(ends_s=told.ends_s[id], policy=policy.policy, assumed=id in told.assumed)


_TELL: Final = "how much work is left (an Agent does, and so does --time-limit)"
