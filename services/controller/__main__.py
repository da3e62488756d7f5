"""`python -m slackwater.services.controller --config FILE`."""

from slackwater.common.shell.main import main
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.shell import definition

raise SystemExit(main("controller", ControllerConfig, definition))
