"""One simulation for a script: jobs, a policy by name and a job model in, the result out.

What `loadgen simulate` does for one policy, without a trace file, a report or other processes.
"""

from collections.abc import Mapping, Sequence

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.base import FitsPolicy, JobModel
from slackwater.loadgen.simulator.gpu.outcome import Costs, Result, Scaling, Settings
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import Rules


def simulate_once(
    jobs: Sequence[Submission],
    cluster: Cluster,
    policy: str,
    model: JobModel,
    *,
    knobs: Mapping[str, str] | None = None,
    restart_s: float = 0.0,
    interference: float = 0.0,
    scaling: Scaling | None = None,
    record: bool = False,
) -> Result:
    """`restart_s` is paid at first starts too."""
    chosen = make(policy, knobs)
    if isinstance(model, FitsPolicy):
        jobs = model.adapt(jobs, chosen)
    settings = Settings(
        rules=Rules(restart_s=restart_s),
        costs=Costs(start_s=restart_s, restart_s=restart_s),
        slowdowns=Slowdowns(interference=interference),
        scaling=scaling,
    )
    return Engine(jobs, cluster, chosen, model, settings, record=record).run()
