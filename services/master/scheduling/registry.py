"""Policies by name. Third parties add theirs by the entry point group `slackwater.policies`.

A registered policy is a class whose constructor takes the policy's knobs as keyword arguments,
each annotated with int, float, bool, str or a Literal of texts and each with a default, numbers
with their bounds (`Annotated[float, Meta(gt=0)]`): `--set name.option=value` is checked against
that signature, so an unknown knob or a bad value is refused with the remedy.
"""

import inspect
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.registry import Registry
from slackwater.services.master.scheduling.rules import honours_of
from slackwater.services.master.scheduling.view import Policy

P = TypeVar("P", bound=Policy)
ENTRY_POINTS: Final = "slackwater.policies"

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=limits.TRACE_SECONDS_MAX)]
Period = Annotated[float, msgspec.Meta(ge=1e-3, le=limits.TRACE_SECONDS_MAX)]
AtLeast0 = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=limits.TRACE_GPUS_MAX)]
Consolidate = Literal["prefer", "require", "no"]
"""Kinds of knobs that several policies have."""

_HERE: Final = "slackwater.services.master.scheduling.policies"
BUILT_IN: Final = {
    "fifo": f"{_HERE}.sequences:Fifo",
    "easy-backfill": f"{_HERE}.easy_backfill:EasyBackfill",
    "best-effort": f"{_HERE}.sequences:BestEffort",
    "sf": f"{_HERE}.sequences:SmallestFirst",
    "srtf": f"{_HERE}.sequences:ShortestRemainingTime",
    "srsf": f"{_HERE}.sequences:ShortestRemainingService",
    "gandiva": f"{_HERE}.gandiva:Gandiva",
    "tiresias-las": f"{_HERE}.tiresias:TiresiasLas",
    "tiresias-gittins": f"{_HERE}.tiresias:TiresiasGittins",
    "tiresias-artifact": f"{_HERE}.tiresias_artifact:TiresiasArtifact",
    "optimus": f"{_HERE}.optimus:Optimus",
    "pollux": f"{_HERE}.pollux:Pollux",
    "hell": f"{_HERE}.hell_knee:Hell",
    "knee": f"{_HERE}.hell_knee:Knee",
    "srpt": f"{_HERE}.elastic_baselines:ShortestWithAllNodes",
    "waterfill": f"{_HERE}.elastic_baselines:Waterfill",
    "equal-share": f"{_HERE}.elastic_baselines:EqualShare",
    "jsq-chunk": f"{_HERE}.jsq_chunk:JsqChunk",
    "harmony": f"{_HERE}.harmony:Harmony",
    "isolated": f"{_HERE}.harmony_baselines:Isolated",
    "naive-colocation": f"{_HERE}.harmony_baselines:NaiveColocation",
}
"""Name -> class, imported when the policy is first asked for."""
POLICIES: Final = Registry[Policy]("policy", BUILT_IN, ENTRY_POINTS)


def register(name: str) -> Callable[[type[P]], type[P]]:
    """Class decorator: the class is the policy called `name`."""

    def put(factory: type[P]) -> type[P]:
        honours_of(factory)
        POLICIES.add(name, factory)
        factory.registered_name = name  # type: ignore[attr-defined]  # for what people read
        return factory

    return put


def names() -> list[str]:
    return POLICIES.names()


def make(name: str, options: Mapping[str, str] | None = None) -> Policy:
    """The policy of that name with its knobs set from text."""
    factory = POLICIES.find(name)
    return factory(**parse_options(name, factory, options or {}))


def options_of(name: str) -> dict[str, Any]:
    """Every knob of a policy with its default."""
    parameters = inspect.signature(POLICIES.find(name)).parameters
    return {p.name: p.default for p in parameters.values()}


def parse_options(
    name: str, factory: Callable[..., object], options: Mapping[str, str]
) -> dict[str, Any]:
    known = inspect.signature(factory, eval_str=True).parameters
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known:
            raise ConfigRejected(
                f"{name} has no option {key!r}; it has {', '.join(known) or 'none'}"
            )
        values[key] = _parse(f"{name}.{key}", known[key].annotation, text)
    return values


def _parse(label: str, kind: Any, text: str) -> Any:
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    kinds = (plain, *get_args(plain))
    if bool in kinds and text.lower() in ("yes", "no"):
        return text.lower() == "yes"
    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
        if bool in kinds:
            why = f"give {' or '.join(('true', 'false', *words))}"
        elif words:
            why = f"choose one of {', '.join(words)}"
        else:
            why = str(error).split(", got")[0].replace("`", "").lower()
        raise ConfigRejected(f"{label}={text!r}: {why}") from error
    if isinstance(value, float) and not isfinite(value):
        raise ConfigRejected(f"{label}={text!r}: give a finite number")
    return value
