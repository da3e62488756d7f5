"""The embedded cluster: real services as child processes, with a supervisor in systemd's place."""

from slackwater.common.embedded.cluster import (
    ClusterOptions,
    EmbeddedCluster,
    controllers_for,
    fit_cpu_share,
    whole_cores,
)
from slackwater.common.embedded.supervisor import Supervisor
from slackwater.common.embedded.unit import UnitSpec, UnitStatus

__all__ = [
    "ClusterOptions",
    "EmbeddedCluster",
    "Supervisor",
    "UnitSpec",
    "UnitStatus",
    "controllers_for",
    "fit_cpu_share",
    "whole_cores",
]
