"""Samples of configuration files, and all that is wrong with one."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from slackwater.cli.commands import app
from slackwater.cli.config_file import (
    SERVICES,
    Service,
    config_type,
    faults,
    sample,
    sample_job,
    service_of,
)
from slackwater.cli.job_file import read_job
from slackwater.common.base import fields
from slackwater.common.shell.config import load_config
from slackwater.console.program import answered
from slackwater.schemas.base import AN_ID
from slackwater.schemas.jobs import JobSpec


def opened(text: str) -> str:
    """With the keys that are behind a #."""
    return "\n".join(
        line[1:] if line.startswith("#") and line[1:2] not in ("", " ") else line
        for line in text.splitlines()
    )


def test_a_sample_of_a_job_can_be_submitted_whether_its_keys_are_behind_a_hash_or_not(
    tmp_path: Path,
) -> None:
    text, path = sample_job(), tmp_path / "job.toml"
    path.write_text(text)
    job = read_job(path)
    path.write_text(opened(text))
    assert read_job(path) == msgspec.structs.replace(job, aggregation="edf", batch="adaptive")
    assert tomllib.loads(opened(text)).keys() == fields.fields_of(JobSpec).keys()


@pytest.mark.parametrize("service", SERVICES)
def test_a_sample_is_a_configuration_whether_its_keys_are_behind_a_hash_or_not(
    service: Service, tmp_path: Path
) -> None:
    kind = config_type(service)
    text = sample(service)
    open_text = opened(text)
    for version in (text, open_text):
        assert service_of(version, "x") == service
        assert faults(version, kind) == []
    path = tmp_path / "service.toml"
    path.write_text(text)
    as_it_is = load_config(path, kind)
    path.write_text(open_text)
    assert msgspec.structs.replace(load_config(path, kind), **_with_defaults(as_it_is)) == as_it_is
    assert tomllib.loads(open_text).keys() == fields.fields_of(kind).keys()


def _with_defaults(config: msgspec.Struct) -> dict[str, object]:
    """Return keys that a sample shows by an example of their own: tenants.default."""
    return {"tenants": config.tenants} if hasattr(config, "tenants") else {}


@pytest.mark.parametrize("service", SERVICES)
def test_every_key_says_what_it_is_for(service: Service) -> None:
    kind = config_type(service)
    assert fields.fields_of(kind).keys() == fields.docs(kind).keys()


BAD = """\
id = "a b"
agregators_max = 3
metrics_port = 70000

[credentials]
usr = "x"

[tenants.vision]
cpu_fraction = 2.0
"""


def test_every_fault_is_told_with_its_line_and_remedy(tmp_path: Path) -> None:
    found = [(fault.line, fault.key, fault.why) for fault in faults(BAD, config_type("master"))]
    assert found == [
        (1, "id", f"'a b': give {AN_ID}"),
        (2, "agregators_max", "unknown; the nearest is aggregators_max: "
         "give a whole number from 1 to 1,024"),
        (3, "metrics_port", "70000: give a whole number from -1 to 65,535"),
        (6, "credentials.usr", "unknown; the nearest is credentials.user: give a text"),
        (9, "tenants.vision.cpu_fraction", "2.0: give a number above 0 and of at most 1"),
    ]  # fmt: skip


def test_keys_that_are_missing_are_named() -> None:
    text = 'id = "a1"\nurl = "nats://127.0.0.1:4222"\ntcp_address = "10.0.0.1:0"\n'
    assert [fault.why.split(":")[0] for fault in faults(text, config_type("aggregator"))] == [
        "set shm_path, or state_dir for its socket", "tcp_address needs a cluster_token",
    ]  # fmt: skip


def test_what_is_not_toml_is_told_with_its_line() -> None:
    (fault,) = faults('id = "a"\n=\n', config_type("master"))
    assert (fault.line, fault.why.split(":")[0]) == (2, "not TOML")


@pytest.mark.parametrize(
    ("text", "name", "service"),
    [
        ("# service: worker\n", "master", "worker"),
        ("", "master", "master"),
        ("", "aggregator-a1", "aggregator"),
        ("", "controller@c0", "controller"),
        ("", "master-and-worker", None),
        ("", "masters", None),
        ("# service: mistress\n", "master", None),
    ],
)
def test_whose_file_it_is(text: str, name: str, service: str | None) -> None:
    assert service_of(text, name) == service


def test_the_command_and_its_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*words: str) -> tuple[int, str]:
        code = answered(app, ["config", "check", *words], "slackwater")
        done = capsys.readouterr()
        return code, done.out + done.err

    master, other = tmp_path / "master.toml", tmp_path / "x.toml"
    master.write_text(BAD)
    other.write_text('id = "w1"\n')
    code, said = check(str(master))
    assert (code, said.count("error: ")) == (78, 5)
    assert f"error: {master}:3: metrics_port: 70000: give a whole number" in said
    assert check(str(other))[0] == 2
    assert check(str(other), "--service", "worker") == (0, f"{other}: good for a worker\n")
    assert check(str(tmp_path))[0] == 78
    code, said = check(str(master), "--json")
    assert (code, len(msgspec.json.decode(said)["faults"])) == (78, 5)
