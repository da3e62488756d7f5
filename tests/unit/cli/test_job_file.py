"""Job files: the schema that describes them, and what a wrong one is told."""

import json
from pathlib import Path

import pytest

from slackwater.cli.job_file import job_schema, read_job
from slackwater.common.base import fields
from slackwater.common.base.errors import Rejected
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.tensors import UpdateRule

SPEC = {"id": "mnist", "workers": 2, "program": ["python", "train.py"], "update": {"name": "adam"}}


def test_a_job_is_read_from_json_toml_and_yaml_alike(tmp_path: Path) -> None:
    as_json, as_toml = tmp_path / "job.json", tmp_path / "job.toml"
    as_json.write_text(json.dumps(SPEC))
    as_toml.write_text(
        'id = "mnist"\nworkers = 2\nprogram = ["python", "train.py"]\n[update]\nname = "adam"\n'
    )
    as_yaml = tmp_path / "job.yaml"
    as_yaml.write_text(
        "id: mnist\nworkers: 2\nprogram: [python, train.py]\nupdate:\n  name: adam\n"
    )
    spec = read_job(as_json)
    assert spec == read_job(as_toml) == read_job(as_yaml)
    assert spec == JobSpec(
        id="mnist", workers=2, program=("python", "train.py"), update=UpdateRule(name="adam")
    )


def test_the_schema_describes_every_key() -> None:
    schema = job_schema()
    assert schema["properties"].keys() == fields.fields_of(JobSpec).keys()
    rule = schema["$defs"]["UpdateRule"]
    assert rule["properties"].keys() == fields.fields_of(UpdateRule).keys()
    for table in (schema, rule):
        assert table["additionalProperties"] is False
        assert all(each["description"].endswith(".") for each in table["properties"].values())
    assert json.loads(json.dumps(schema)) == json.loads(json.dumps(job_schema()))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.json", '{"id": "a", "worker": 3}', "unknown key worker; the nearest is workers"),
        ("job.json", '{"id": "a", "update": {"nme": 1}}', "unknown key update.nme; the nearest is"),
        ("job.json", '{"id": "a", "workers": 0}', "workers = 0: give a whole number from 1 to 64"),
        ("job.json", '{"id": "a", "update": {"name": "sdg"}}', "update.name = 'sdg': give one of"),
        ("job.json", '{"id": "a b"}', "id = 'a b': give letters, digits, - and _"),
        ("job.json", '{"id": "a", "workers": NaN}', "not JSON: JSON is malformed"),
        ("job.conf", "id = 1", "not JSON (a TOML file ends in .toml, a YAML file in .yaml)"),
        ("job.json", "[]", "give a table of keys"),
        ("job.json", "[" * 100_000, "too deeply nested"),
        ("job.toml", "id = ", "not TOML"),
        ("job.toml", 'program = ["true"]', "key id is missing"),
        ("job.yaml", "id: [", "not YAML: while parsing a flow"),
        ("job.yaml", "id: a\nworkers: 0", "workers = 0: give a whole number from 1 to 64"),
        ("job.yaml", "!!python/object/apply:os.getcwd []", "not YAML"),
        ("job.yml", "just text", "give a table of keys"),
    ],
)
def test_a_wrong_file_is_told_the_key_the_value_and_the_remedy(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(Rejected) as refused:
        read_job(path)
    assert f"{path}: {said}" in str(refused.value)
