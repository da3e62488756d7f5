"""Asynchronous jobs as policies of Lin et al. (2018, section IV) see them: X(k) by exact mean value
analysis of the four times that their Agents measured, and the updates that are left.

Pure. A job is its updates, whoever makes them: iterations times the workers that it was submitted
with, less what its ranks have reported. One that does not say how many has as many left as it has
made. A job whose times are not known, or one of another kind, comes first with its fewest GPUs:
that is where Lin's model is profiled, and what is not known cannot be weighed.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.asynchronous_speed import speeds
from slackwater.common.domains.models.speedup import ElasticProfile, SpeedupCurve
from slackwater.schemas.base import JobId
from slackwater.schemas.steps import StepProfile
from slackwater.services.master.jobs import Job
from slackwater.services.master.progress import Progress, own_iterations
from slackwater.services.master.scheduling.policies.elastic import ElasticPolicy
from slackwater.services.master.scheduling.view import JobView, Policy, View

UNKNOWN_S: Final = 1e9
"""Seconds that a job needs which is not measured: nobody's filling is measured by it (eq. 5)."""
CURVES_MAX: Final = 4096
"""Curves that are kept: equal ones must be one object, by which policies group jobs."""


def with_curves(policy: Policy, view: View, jobs: Mapping[JobId, Job]) -> View:
    """Return the view with curves for a policy that goes by them; for others, as it is."""
    if not isinstance(policy, ElasticPolicy):
        return view
    shown = {id: _shown(seen, jobs[id]) for id, seen in view.jobs.items()}
    return msgspec.structs.replace(view, jobs=shown, changed=None)


def _shown(seen: JobView, job: Job) -> JobView:
    spec, steps = job.record.spec, job.record.steps
    each, curve = spec.gpus_each or 1, None
    if spec.consistency == "asynchronous" and steps is not None:
        curve = curve_of(steps, max(seen.gpus_max, seen.gpus), each)
    if curve is None:
        size = seen.held_gpus or seen.gpus_min
        return msgspec.structs.replace(
            seen,
            gpus_min=size,
            gpus_max=size,
            priority=2 * seen.priority + 1,
            remaining_s_then=min(seen.remaining_s_then, UNKNOWN_S),
            profile=None,
        )
    left = updates_left(spec.iterations * spec.workers, job.progress, own_iterations(spec) > 0)
    rate = curve.x[min(seen.gpus, curve.nodes)]
    return msgspec.structs.replace(
        seen,
        priority=2 * seen.priority,
        remaining_s_then=left / rate,
        speed=0.0,  # It was reckoned now.
        profile=ElasticProfile(curve, max(left, float(spec.iterations * spec.workers))),
    )


@lru_cache(CURVES_MAX)
def curve_of(steps: StepProfile, gpus: int, each: int) -> SpeedupCurve | None:
    """Return X by GPUs, of which each worker has `each`; what is left of one is of no use. None:
    such times cannot be."""
    try:
        found = speeds(steps, max(1, gpus // each)).tolist()
    except Rejected:
        return None  # It counts as not measured.
    part = [found[1] * held / each for held in range(each)]
    return SpeedupCurve([*part, *(found[held // each] for held in range(each, gpus + 1))])


def updates_left(whole: int, progress: Progress, told: bool) -> float:
    """Count the updates to come; `told`: the job says how many it makes."""
    return float(max(1, whole - progress.updates if told else progress.updates))
