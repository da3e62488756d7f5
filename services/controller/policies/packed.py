"""The control: every job on one shared aggregator, unprofiled and unwatched.

An experiment that finds sharing harmless must show that it can see harm: under this policy the
jobs have to lose more than the limit, or their aggregators were never short of CPU and "servers
saved" proves nothing (ADR 17).
"""

from slackwater.services.controller.policies.view import (
    NEW,
    ClusterView,
    Defaults,
    JobView,
    Memory,
    Plan,
)


class Packed(Defaults):
    """Registered as `packed`."""

    def assign(self, view: ClusterView, job: JobView, memory: Memory) -> tuple[Plan, Memory]:
        if not view.aggregators and view.new_max < 1:
            return Plan(reason="1 aggregator is needed, none may be asked"), memory
        names = sorted(aggregator.id for aggregator in view.aggregators)
        home = names[0] if names else f"{NEW}0"
        places = tuple(
            place or current or home for place, current in zip(job.places, _now(job), strict=True)
        )
        return Plan(places=places, new=0 if names or home not in places else 1), memory


def _now(job: JobView) -> tuple[str | None, ...]:
    return job.current or (None,) * len(job.places)
