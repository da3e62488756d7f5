"""The master's configuration."""

from typing import Annotated

import msgspec

from slackwater.common.config import ServiceConfig
from slackwater.schemas.base import IdText

Duration = Annotated[float, msgspec.Meta(gt=0.0)]


class MasterConfig(ServiceConfig, kw_only=True, frozen=True):
    """Fields with unit, default and meaning."""

    id: IdText = "m0"
    """Tells this instance from its standby; whichever leads answers as `main`."""
    aggregators_max: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Aggregators that one cluster may hold at once, temporary ones included."""
    cluster_scaling_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Seconds between two adjustments of the number of clusters that take new jobs; 0: all do."""
    tick_s: Duration = 1.0
    """Seconds between two looks at what is lost, silent or still to be told."""
    jobs_kept_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """Ended jobs that are remembered; the oldest are forgotten first."""
    agent_silent_s: Duration = 300.0
    """A job that its user started by hand has failed when no rank was heard for so many seconds."""
    agent_absent_s: Duration = 3600.0
    """A job that its user would start by hand has failed when it is not started in this time."""
    node_silent_s: Duration = 30.0
    """The jobs of a worker node that was not heard for so many seconds have failed."""
    rank_missing_s: Duration = 15.0
    """A rank that its node no longer runs has failed when no end of it is reported in this time."""
