"""`python -m slackwater.services.slabd --config FILE`."""

from slackwater.common.shell.main import main
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.shell import definition

raise SystemExit(main("slabd", SlabdConfig, definition))
