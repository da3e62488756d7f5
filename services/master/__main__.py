"""`python -m slackwater.services.master --config FILE`."""

from slackwater.common.shell.main import main
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.shell import definition

raise SystemExit(main("master", MasterConfig, definition))
