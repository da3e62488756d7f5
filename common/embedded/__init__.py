"""The embedded cluster: real services as child processes, with a supervisor in systemd's place."""

from slackwater.common.embedded.cluster import (
    ClusterOptions,
    EmbeddedCluster,
    fit_cpu_share,
)
from slackwater.common.embedded.supervisor import Supervisor
from slackwater.common.embedded.unit import UnitSpec, UnitStatus

__all__ = [
    "ClusterOptions",
    "EmbeddedCluster",
    "Supervisor",
    "UnitSpec",
    "UnitStatus",
    "fit_cpu_share",
]
