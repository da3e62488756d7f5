"""`python -m slackwater.services.aggregator --config FILE`."""

from slackwater.common.shell.main import main
from slackwater.services.aggregator.config import AggregatorConfig
from slackwater.services.aggregator.shell import definition

raise SystemExit(main("aggregator", AggregatorConfig, definition))
