"""The operator's guide says of every service's configuration what its struct says: every field, its
default, its unit and its bounds."""

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slackwater.common.bus.access import VARIABLES, Credentials, Tls
from slackwater.common.shell.config import DEFAULT_URL, ServiceConfig
from slackwater.services.master.config import Tenant

ROOT = Path(__file__).resolve().parents[3]
SERVICES = sorted(path.parent.name for path in (ROOT / "services").glob("*/config.py"))
SHARED = {field.name for field in msgspec.structs.fields(ServiceConfig)}
UNITS = {"_s": r"seconds?|how long", "_s_max": r"seconds?", "_bytes": r"bytes", "_share": r"cores"}
"""Units of fields with such a name, which their description must say."""


def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """Read each configuration table: key -> default and meaning. The one before any service's name
    is called "all"."""
    text = (ROOT / "docs/guide/operator.md").read_text()
    section = re.split(r"^## ", text, flags=re.M)
    (configuration,) = [part for part in section if part.startswith("Configuration\n")]
    found: dict[str, dict[str, tuple[str, str]]] = {}
    name = "all"
    for line in configuration.splitlines():
        if re.fullmatch(r"[a-z]+", line):
            name = line
        row = re.fullmatch(r"\| `(\w+)` \| (.*?) \| *(.*?) *\|", line)
        if row is not None:
            found.setdefault(name, {})[row[1]] = (row[2], row[3])
    return found


def struct(service: str) -> type[ServiceConfig]:
    module = importlib.import_module(f"slackwater.services.{service}.config")
    (kind,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, ServiceConfig)
        and value.__module__ == module.__name__
    ]
    return kind


def read(default: str) -> Any:
    """The value that a cell such as `"m0"` or `2.0` means; a path has no quotes."""
    text = default.strip("`")
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def own_fields(kind: type[ServiceConfig]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields that the service adds, or has another default of."""
    general = {field.name: field.default for field in msgspec.structs.fields(ServiceConfig)}
    return {
        field.name: field
        for field in msgspec.structs.fields(kind)
        if field.name not in general or field.default != general[field.name]
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_s_table_is_its_struct(service: str) -> None:
    fields = own_fields(struct(service))
    table = tables().get(service, {})
    assert set(table) == set(fields)
    for name, field in fields.items():
        default, meaning = table[name]
        made = field.default_factory
        value = made() if made is not msgspec.NODEFAULT else field.default
        said = read(default)
        assert (tuple(said) if isinstance(said, list) else said) == value, name
        unit = next((u for end, u in UNITS.items() if name.endswith(end)), "")
        assert re.search(unit, meaning), f"{name}: the meaning does not say its unit"


@pytest.mark.parametrize("service", SERVICES)
def test_bounds_on_both_sides_are_told(service: str) -> None:
    table = tables().get(service, {})
    info = msgspec.inspect.type_info(struct(service))
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        low, high = (getattr(field.type, bound, None) for bound in ("ge", "le"))
        if field.encode_name in table and low is not None and high is not None:
            said = table[field.encode_name][1].replace(",", "")
            ends = [int(end) if end == int(end) else end for end in (low, high)]
            assert f"{ends[0]} to {ends[1]}" in said, field.encode_name


def test_what_all_services_have() -> None:
    table = tables()["all"]
    assert set(table) == SHARED
    for field in msgspec.structs.fields(ServiceConfig):
        default = table[field.name][0]
        match field.name:
            case "id":
                assert default == "see below"  # Each service's own.
            case "credentials" | "tls":
                assert read(default) == {}
            case "url":
                assert default == f"`{DEFAULT_URL}`"
            case _:
                assert read(default) == field.default, field.name


def test_the_limits_of_a_tenant_are_told_by_name_with_their_defaults() -> None:
    text = (ROOT / "docs/guide/operator.md").read_text()
    (example,) = re.findall(r"^admission = .*?(?=^```)", text, flags=re.M | re.S)
    told = tomllib.loads(example)["tenants"]
    assert set(told["vision"]) == {field.name for field in msgspec.structs.fields(Tenant)}
    assert {msgspec.convert(limits, Tenant) for limits in told.values()}
    assert f"(default {Tenant().queued_max:,})" in example


def test_the_ways_to_be_known_to_the_bus_are_told_by_name() -> None:
    text = (ROOT / "docs/guide/operator.md").read_text()
    for field in (*msgspec.structs.fields(Credentials), *msgspec.structs.fields(Tls)):
        assert f"`{field.name}`" in text
        assert f"`{VARIABLES[field.name]}`" in text
