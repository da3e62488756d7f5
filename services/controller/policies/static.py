"""The baseline: own servers per job, tensors round robin, nothing ever moves.

What ps-lite and the frameworks built on it do (AutoPS sections 2.1 and 5.1); every saving is
measured against it under the same CPU shares.
"""

from slackwater.services.controller.policies.cyclic import round_robin
from slackwater.services.controller.policies.view import (
    ClusterView,
    Defaults,
    JobView,
    Memory,
    Plan,
)


class Static(Defaults):
    """Registered as `static`."""

    private = True

    def assign(self, view: ClusterView, job: JobView, memory: Memory) -> tuple[Plan, Memory]:
        if all(place is not None for place in job.current) and job.current:
            return Plan(places=tuple(str(place) for place in job.current)), memory
        if any(place is not None for place in job.current):
            return _replace_lost(view, job), memory
        return round_robin(view, job, temporary=False), memory


def _replace_lost(view: ClusterView, job: JobView) -> Plan:
    """Replace all lost servers by one new one."""
    if view.new_max < 1:
        return Plan(reason="1 aggregator is needed to replace a lost one, none may be asked")
    places = tuple(
        place or current or "new#0" for place, current in zip(job.places, job.current, strict=True)
    )
    return Plan(places=places, new=1)
