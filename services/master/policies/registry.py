"""Policies by name. Third parties add theirs by the entry point group `slackwater.policies`.

A registered policy is a class whose constructor takes the policy's knobs as keyword arguments,
each annotated with int, float, bool or str and each with a default: `--set name.option=value` is
checked against that signature, so an unknown knob or a bad value is refused with the remedy.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar

from slackwater.common.errors import ConfigRejected
from slackwater.services.master.policies.view import Policy

P = TypeVar("P", bound=Policy)
ENTRY_POINTS: Final = "slackwater.policies"

_MODULES: Final[dict[str, str]] = {}
_FACTORIES: Final[dict[str, Callable[..., Policy]]] = {}

BUILT_IN: Final = {
    "fifo": "sequences",
    "best-effort": "sequences",
    "sf": "sequences",
    "srtf": "sequences",
    "srsf": "sequences",
    "gandiva": "gandiva",
    "tiresias-las": "tiresias",
    "tiresias-gittins": "tiresias",
    "tiresias-artifact": "tiresias_artifact",
    "optimus": "optimus",
    "pollux": "pollux",
    "hell": "hell_knee",
    "knee": "hell_knee",
    "srpt": "elastic_baselines",
    "waterfill": "elastic_baselines",
    "equal-share": "elastic_baselines",
    "jsq-chunk": "jsq_chunk",
    "harmony": "harmony",
    "isolated": "harmony_baselines",
    "naive-colocation": "harmony_baselines",
}
"""Name -> module of this package, imported when the policy is first asked for."""


def register(name: str) -> Callable[[type[P]], type[P]]:
    """Class decorator: the class is the policy called `name`."""

    def put(factory: type[P]) -> type[P]:
        _FACTORIES[name] = factory
        return factory

    return put


def names() -> list[str]:
    return sorted({*BUILT_IN, *_FACTORIES, *(p.name for p in entry_points(group=ENTRY_POINTS))})


def make(name: str, options: Mapping[str, str] | None = None) -> Policy:
    """The policy of that name with its knobs set from text."""
    factory = _find(name)
    return factory(**parse_options(name, factory, options or {}))


def options_of(name: str) -> dict[str, Any]:
    """Every knob of a policy with its default."""
    parameters = inspect.signature(_find(name)).parameters
    return {p.name: p.default for p in parameters.values()}


def _find(name: str) -> Callable[..., Policy]:
    if name not in _FACTORIES:
        if name in BUILT_IN:
            import_module(f"slackwater.services.master.policies.{BUILT_IN[name]}")
        else:
            for point in entry_points(group=ENTRY_POINTS):
                if point.name == name:
                    _FACTORIES[name] = point.load()
    if name not in _FACTORIES:
        raise ConfigRejected(f"there is no policy {name!r}; choose one of {', '.join(names())}")
    return _FACTORIES[name]


def parse_options(
    name: str, factory: Callable[..., Policy], options: Mapping[str, str]
) -> dict[str, Any]:
    known = inspect.signature(factory, eval_str=True).parameters
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known:
            raise ConfigRejected(
                f"policy {name} has no option {key!r}; it has {', '.join(known) or 'none'}"
            )
        values[key] = _parse(f"{name}.{key}", known[key].annotation, text)
    return values


def _parse(label: str, kind: Any, text: str) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in {"true", "false", "1", "0", "yes", "no"}:
            raise ConfigRejected(f"{label}={text!r} is not a truth value; use true or false")
        return text.lower() in {"true", "1", "yes"}
    try:
        return kind(text)
    except ValueError as error:
        wanted = getattr(kind, "__name__", str(kind))
        raise ConfigRejected(f"{label}={text!r} is not a valid {wanted}") from error
