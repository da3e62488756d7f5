"""Job models by name; a model's knobs are its constructor's keyword arguments, as a policy's."""

import inspect
from collections.abc import Mapping
from typing import Final

from slackwater.common.base.registry import Registry
from slackwater.loadgen.simulator.gpu.jobmodels.base import JobModel
from slackwater.services.master.scheduling.registry import parse_options

_HERE: Final = "slackwater.loadgen.simulator.gpu.jobmodels"
MODELS: Final = Registry[JobModel](
    "job model",
    {
        "fixed": f"{_HERE}.fixed:FixedModel",
        "interleaved": f"{_HERE}.interleaved:InterleavedModel",
        "profiles": f"{_HERE}.profiles:ProfilesModel",
        "queueing": f"{_HERE}.queueing:QueueingModel",
        "subtasks": f"{_HERE}.subtasks:SubtasksModel",
    },
)


def names() -> list[str]:
    return MODELS.names()


def make_model(name: str, options: Mapping[str, str], seed: int) -> JobModel:
    """The job model of that name; `seed` reaches a model that has a knob of that name."""
    found = MODELS.find(name)
    values = parse_options(name, found, options)
    if "seed" in inspect.signature(found).parameters:
        values.setdefault("seed", seed)
    return found(**values)
