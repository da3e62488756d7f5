"""`python -m slackwater.services.profiler --config FILE`."""

from slackwater.common.shell.main import main
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.shell import definition

raise SystemExit(main("profiler", ProfilerConfig, definition))
