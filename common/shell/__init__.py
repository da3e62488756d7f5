"""The shell that every service runs in: see `service` for the life, `definition` for the parts."""

from slackwater.common.shell.definition import Core, Handler, Port, ServiceDefinition
from slackwater.common.shell.process import Process
from slackwater.common.shell.service import Shell, run_service

__all__ = ["Core", "Handler", "Port", "Process", "ServiceDefinition", "Shell", "run_service"]
