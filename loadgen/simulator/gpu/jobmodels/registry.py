"""Job models by name; a model's knobs are its constructor's keyword arguments, as a policy's."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Final

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.simulator.gpu.jobmodels.base import JobModel
from slackwater.services.master.scheduling.registry import parse_options

BUILT_IN: Final = {
    "fixed": "fixed.FixedModel",
    "interleaved": "interleaved.InterleavedModel",
    "profiles": "profiles.ProfilesModel",
    "queueing": "queueing.QueueingModel",
    "subtasks": "subtasks.SubtasksModel",
}
"""Name -> module.class of this package, imported when the model is first asked for."""


def names() -> list[str]:
    return sorted(BUILT_IN)


def make_model(name: str, options: Mapping[str, str], seed: int) -> JobModel:
    """The job model of that name; `seed` reaches a model that has a knob of that name."""
    if name not in BUILT_IN:
        raise ConfigRejected(f"there is no job model {name!r}; choose one of {', '.join(names())}")
    module, _, class_name = BUILT_IN[name].partition(".")
    found = getattr(
        import_module(f"slackwater.loadgen.simulator.gpu.jobmodels.{module}"), class_name
    )
    values = parse_options(name, found, options)
    if "seed" in inspect.signature(found).parameters:
        values.setdefault("seed", seed)
    model: JobModel = found(**values)
    return model
