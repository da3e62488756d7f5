"""The profiler's configuration."""

from typing import Annotated

import msgspec

from slackwater.common.base import limits
from slackwater.common.shell.config import ServiceConfig
from slackwater.schemas.base import IdText

Duration = Annotated[float, msgspec.Meta(gt=0.0)]


class ProfilerConfig(ServiceConfig, kw_only=True, frozen=True):
    """Fields with unit, default and meaning."""

    id: IdText = "p0"
    warm_up_iterations: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 2
    """The first iterations under a placement, which do not count."""
    profile_iterations: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 10
    """Iterations of every rank that a profile needs (5 in the embedded demonstration)."""
    profile_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Seconds of training that a profile needs at least: short iterations differ by their moment (2
    in the embedded demonstration)."""
    profile_iterations_max: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 100
    """A profile whose halves differ by more than 5 % is extended, up to so many iterations: it is
    said with them, whatever they say."""
    profile_s_max: Duration = 30.0
    """Seconds of training after which a profile is not extended either."""
    window_iterations: Annotated[int, msgspec.Meta(ge=1, le=limits.WINDOW_ITERATIONS_MAX)] = 50
    """Iterations of one monitor window (20 in the embedded demonstration). Two in succession decide
    that a job loses too much."""
    window_s: Duration = 150.0
    """Seconds after which a slow job's window ends with fewer iterations, ten at least."""
    host_period_s: Duration = 5.0
    """Seconds between two measurements of the host's load."""
    forget_after_s: Duration = 600.0
    """A job of which nothing was heard for so many seconds is forgotten."""
