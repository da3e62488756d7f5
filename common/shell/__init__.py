"""The shell that every service runs in: see `service` for the life, `definition` for the parts."""

from slackwater.common.shell.definition import Core, Port, ServiceDefinition
from slackwater.common.shell.effect_runner import EffectRunner, handlers, on
from slackwater.common.shell.process import Process
from slackwater.common.shell.service import Shell, run_service

__all__ = [
    "Core",
    "EffectRunner",
    "Port",
    "Process",
    "ServiceDefinition",
    "Shell",
    "handlers",
    "on",
    "run_service",
]
