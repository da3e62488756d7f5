"""Job files: a `JobSpec` as YAML, TOML or JSON, as `slackwater submit` reads it and `slackwater
config schema job` describes it."""

import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from slackwater.common.base import fields
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.shell.config import parse_config
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.tensors import UpdateRule

JOB_FILE_ENDINGS: Final = (".yaml", ".yml", ".toml", ".json")


def read_job(file: Path) -> JobSpec:
    """Read a job file. Raises Rejected, which names the file, the key, its value and what it has to
    be."""
    data = _decoded(file)
    if not isinstance(data, dict):
        raise Rejected(f"{file}: give a table of keys, as `slackwater config schema job` has them")
    try:
        return parse_config(data, JobSpec, str(file))
    except ConfigRejected as error:  # The file is a job's, not a service's configuration.
        raise Rejected(str(error)) from error


def _decoded(file: Path) -> Any:
    text = file.read_bytes()
    kind = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}.get(file.suffix, "JSON")
    try:
        if kind == "TOML":
            return tomllib.loads(text.decode())
        if kind == "YAML":
            return msgspec.yaml.decode(text)
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        other = file.suffix not in JOB_FILE_ENDINGS
        hint = " (a TOML file ends in .toml, a YAML file in .yaml)" if other else ""
        raise Rejected(f"{file}: not {kind}{hint}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise Rejected(f"{file}: too deeply nested for a job") from error


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file, each key with its description."""
    _, found = msgspec.json.schema_components([JobSpec], ref_template="#/$defs/{name}")
    kinds = {kind.__name__: kind for kind in (JobSpec, UpdateRule)}
    described = {name: _described(schema, kinds[name]) for name, schema in found.items()}
    whole = described.pop(JobSpec.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **whole,
        "description": "A job, as `slackwater submit JOB_FILE` takes it.",
        "$defs": described,
    }


def _described(schema: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    docs = fields.docs(kind)
    properties = {
        name: {**_for_any_reader(each), "description": docs[name]}
        for name, each in schema["properties"].items()
    }
    summary = " ".join(schema["description"].split())
    return {
        **schema, "description": summary, "properties": properties, "additionalProperties": False,
    }  # fmt: skip


def _for_any_reader(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite an expression for JSON Schema, which has ECMAScript's: their end is a $."""
    if "pattern" not in schema:
        return schema
    return {**schema, "pattern": schema["pattern"].replace(r"\Z", "$")}
