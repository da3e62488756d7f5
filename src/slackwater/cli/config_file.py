"""A service's configuration file: a sample with every key, and all that is wrong with one; a sample
of a job file.

All are made from the service's own configuration struct, or a job's; nothing is written twice.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import inspect as types

from slackwater.common.base import fields
from slackwater.common.base.codec import nearest
from slackwater.common.shell.config import ServiceConfig, toml
from slackwater.schemas.jobs import JobSpec

Service = Literal["master", "controller", "aggregator", "profiler", "worker", "slabd"]
Sampled = Literal[Service, "job"]
SERVICES: Final[tuple[Service, ...]] = get_args(Service)
_WIDTH: Final = 96
_HEAD: Final = (
    "Every key of {}. A key behind # has the default that is shown; remove the # to change it."
)
_EXAMPLES: Final = {"aggregation": "edf", "batch": "adaptive"}
"""Show keys whose default TOML cannot say by a value; they may be left out."""
_TOLD: Final = re.compile(r"^#\s*service:\s*(\w+)\s*$", re.MULTILINE)
_HEADER: Final = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+\s*(#.*)?$")
_KEY: Final = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+?)\s*=")


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong with a file. `line` 0: with the file as a whole."""

    line: int
    key: str
    why: str


def config_type(service: Service) -> type[ServiceConfig]:
    module = import_module(f"slackwater.services.{service}.config")
    kind: type[ServiceConfig] = getattr(module, f"{service.capitalize()}Config")
    return kind


def service_of(text: str, name: str) -> Service | None:
    """Find the service that the file is for: a line `# service: master` names it, else the file's
    name does, as in master.toml or aggregator-a1.toml. None: neither does."""
    told = _TOLD.search(text)
    words = [told[1]] if told else re.split(r"[^a-z]+", name.lower())
    found = [service for service in SERVICES if service in words]
    return found[0] if len(found) == 1 else None


# Faults -------------------------------------------------------------------------------------------


def faults(text: str, kind: type[ServiceConfig]) -> list[Fault]:
    """List all that is wrong with the text of a file, in its order; empty: the file can be used."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        return [Fault(int(at[1]) if at else 0, "", f"not TOML: {error}")]
    lines = _lines(text)
    found = sorted(_of_table(data, kind, "", lines), key=lambda fault: fault.line)
    if not found:
        return [Fault(0, "", why) for why in msgspec.convert(data, kind).faults()]
    return found


def _of_table(
    data: Mapping[str, Any], kind: type[msgspec.Struct], at: str, lines: Mapping[str, int]
) -> Iterator[Fault]:
    known, hints = fields.fields_of(kind), get_type_hints(kind, include_extras=True)
    for key, value in data.items():
        path = f"{at}{key}"
        line = lines.get(path, 0)
        if key not in known:
            near = nearest(key, known)
            why = f"unknown; the nearest is {at}{near}: give {fields.wanted(known[near].type)}"
            yield Fault(line, path, why)
            continue
        inner = known[key].type
        if isinstance(inner, types.StructType) and isinstance(value, dict):
            yield from _of_table(value, inner.cls, f"{path}.", lines)
        elif (many := _struct_of(inner)) and isinstance(value, dict):
            for name, one in value.items():
                if isinstance(one, dict):
                    yield from _of_table(one, many, f"{path}.{name}.", lines)
        else:
            try:
                msgspec.convert(value, hints[key])
            except msgspec.ValidationError:
                yield Fault(line, path, f"{fields.shown(value)}: give {fields.wanted(inner)}")


def _struct_of(type: types.Type) -> type[msgspec.Struct] | None:
    """Return the struct of which a dictionary has several."""
    match type:
        case types.DictType(value_type=types.StructType(cls=kind)):
            return kind
    return None


def _lines(text: str) -> dict[str, int]:
    """Find the line of each key, by its path. A table's header counts for the table."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _path(header[1])
            found.setdefault(table, number)
            table += "."
        elif key := _KEY.match(line):
            path = table + _path(key[1])
            for end in range(len(path.split("."))):
                found.setdefault(".".join(path.split(".")[: end + 1]), number)
    return found


def _path(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


# A sample ---------------------------------------------------------------------------------------


def sample(service: Service) -> str:
    """Write every key with its purpose, the values that it takes and its default. A key that has a
    default is behind #."""
    kind = config_type(service)
    must: dict[str, Any] = {"id": kind().id}  # type: ignore[call-arg]
    if kind().faults():  # type: ignore[call-arg]
        must["state_dir"] = f"/var/lib/slackwater/{service}"
    head = [f"# service: {service}", *_comment(_HEAD.format(f"the {service}'s configuration"))]
    return _sample(kind, head, must)


def sample_job() -> str:
    """Show every key of a job file, those of a program that trains without a #."""
    must = {"id": "train-1", "workers": 2, "program": ["python", "train.py"]}
    return _sample(JobSpec, _comment(_HEAD.format("a job, for `slackwater submit JOB_FILE`")), must)


def _sample(kind: type[msgspec.Struct], head: list[str], must: dict[str, Any]) -> str:
    """`must`: what is not behind a #, and its value."""
    parts, tables = head, list[str]()
    docs = fields.docs(kind)
    for name, field in fields.fields_of(kind).items():
        many = _struct_of(field.type)
        inner = field.type.cls if isinstance(field.type, types.StructType) else many
        if inner is not None:
            header = f"{name}.default" if many else name
            tables += ["", *_comment(docs.get(name, "")), f"#[{header}]", *_keys(inner)]
        else:
            made = field.default_factory
            default = field.default if made is msgspec.NODEFAULT else made()
            value = must.get(name, _EXAMPLES.get(name, default))
            parts += ["", *_key(name, field.type, docs.get(name, ""), value, name not in must)]
    return "\n".join([*parts, *tables]) + "\n"


def _keys(kind: type[msgspec.Struct]) -> Iterator[str]:
    docs = fields.docs(kind)
    for name, field in fields.fields_of(kind).items():
        yield from _key(name, field.type, docs.get(name, ""), field.default, True)


def _key(name: str, type: types.Type, doc: str, value: Any, behind: bool) -> Iterator[str]:
    taken = fields.wanted(type)
    yield from _comment(f"{doc} Takes {taken}." if doc else f"Takes {taken}.")
    yield f"{'#' if behind else ''}{name} = {toml(value)}"


def _comment(text: str) -> list[str]:
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line] if text else []
