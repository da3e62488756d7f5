"""The two extremes and the middle, to compare HELL and KNEE with (Lin et al., 2018, V-B).

`srpt`         all nodes to the job that finishes soonest with them
`waterfill`    as many jobs as possible, a node each in order of submission, then filling (eq. 5)
`equal-share`  the nodes in equal parts (not in the paper: what waterfill is often taken to be)
"""

from collections.abc import Mapping

from slackwater.common.domains.models.speedup import Sizes
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.elastic import (
    Choice,
    ElasticPolicy,
    Kind,
    Pool,
    fill,
    select,
)
from slackwater.services.master.scheduling.registry import register
from slackwater.services.master.scheduling.view import JobView, View


@register("srpt")
class ShortestWithAllNodes(ElasticPolicy):
    """Nodes beyond a job's largest size go to the next."""

    def sizes(
        self, view: View, pool: Pool, budget: int, kept: Mapping[JobId, int]
    ) -> dict[JobId, int]:
        def table(kind: Kind) -> Sizes:
            return kind.curve.everything()

        kinds = pool.by_kind(view.now_s, 0.0, kept)
        return select(kinds, budget, table, lambda kind: 1.0)[0]


def _least_each(
    pool: Pool, budget: int, kept: Mapping[JobId, int]
) -> tuple[dict[JobId, int], list[JobView], int]:
    """The least size for as many as fit, by submission; what is left."""
    sizes: dict[JobId, int] = {}
    jobs = []
    for job in pool.in_submission_order(budget, kept):
        if job.gpus_min <= budget:
            sizes[job.id] = job.gpus_min
            budget -= job.gpus_min
            jobs.append(job)
    return sizes, jobs, budget


@register("waterfill")
class Waterfill(ElasticPolicy):
    def sizes(
        self, view: View, pool: Pool, budget: int, kept: Mapping[JobId, int]
    ) -> dict[JobId, int]:
        sizes, jobs, left = _least_each(pool, budget, kept)
        fill(sizes, [Choice(j, pool.work(j, view.now_s, 0.0), pool.curve(j)) for j in jobs], left)
        return sizes


@register("equal-share")
class EqualShare(ElasticPolicy):
    """No job gets more than makes it faster; the rest is shared again."""

    def sizes(
        self, view: View, pool: Pool, budget: int, kept: Mapping[JobId, int]
    ) -> dict[JobId, int]:
        sizes, jobs, left = _least_each(pool, budget, kept)
        most = {job.id: pool.curve(job).fastest().at(view.cluster.gpus)[0] for job in jobs}
        growing = sorted(jobs, key=lambda job: (sizes[job.id], job.number))
        while left > 0 and growing:
            level = sizes[growing[0].id] + max(1, left // len(growing))
            for job in growing:
                grant = min(level, most[job.id]) - sizes[job.id]
                if 0 < grant <= left:
                    sizes[job.id] += grant
                    left -= grant
                if not left:
                    break
            growing = [job for job in growing if sizes[job.id] < most[job.id]]
            growing.sort(key=lambda job: (sizes[job.id], job.number))
        return sizes
