"""What `slackwater up` starts unless it is told otherwise."""

import inspect

from slackwater.cli.up import up
from slackwater.common.embedded import fit_cpu_share


def test_its_aggregators_are_whole_cores_on_any_machine() -> None:
    """People train there. Emulated pools of fractions are what `loadgen replay` starts."""
    defaults = inspect.signature(up).parameters
    share, count = defaults["cpu_share"].default, defaults["aggregators"].default
    assert fit_cpu_share(share, count, cores=1) == 1.0
