"""`python -m slackwater.services.worker --config FILE`."""

from slackwater.common.shell.main import main
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.shell import definition

raise SystemExit(main("worker", WorkerConfig, definition))
