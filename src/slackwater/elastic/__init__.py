"""Elastic programs: micro-tasks, tables that all hosts share, and machines that come and go.

from slackwater.elastic import App, Executor, Ssp, Table, launch
"""

from slackwater.elastic.app import App, Executor, Table
from slackwater.elastic.context import Context
from slackwater.elastic.drivers import Asp, Bsp, Driver, Rotation, Run, Ssp
from slackwater.elastic.failures import end_ranks_that_raise
from slackwater.elastic.rules import AdaGrad, Add, Decay, NonNegative, SoftThreshold, TableRule
from slackwater.elastic.run import launch

__all__ = [
    "AdaGrad", "Add", "App", "Asp", "Bsp", "Context", "Decay", "Driver", "Executor", "NonNegative",
    "Rotation", "Run", "SoftThreshold", "Ssp", "Table", "TableRule", "launch",
]  # fmt: skip

end_ranks_that_raise()
