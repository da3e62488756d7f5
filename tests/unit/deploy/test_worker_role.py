"""The role of a node that runs jobs: what it writes is a worker service's configuration."""

import json
import re
from pathlib import Path

import pytest

from slackwater.common.shell.config import load_config
from slackwater.schemas.base import NodeId
from slackwater.services.worker.config import WorkerConfig, configured_gpus

ANSIBLE = Path(__file__).resolve().parents[3] / "deploy/ansible"
ROLE = ANSIBLE / "roles/slackwater_worker"


def defaults() -> dict[str, str]:
    text = (ROLE / "defaults/main.yml").read_text()
    return {
        name: value.split("  #")[0].strip().strip('"')
        for name, value in re.findall(r"^(slackwater_\w+): (.*)$", text, re.M)
    }


def hosts(group: str) -> dict[str, dict[str, str]]:
    """Host -> its variables in the example inventory."""
    sections = re.split(r"^\[(.+)\]$", (ANSIBLE / "inventory.example.ini").read_text(), flags=re.M)
    lines = dict(zip(sections[1::2], sections[2::2], strict=True))[group].splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {host: dict(word.split("=", 1) for word in words) for host, *words in rows}


def rendered(folder: Path, variables: dict[str, str]) -> WorkerConfig:
    """Put variables into the template, which has no other expressions."""
    template = (ROLE / "templates/worker.toml.j2").read_text()
    path = folder / "worker.toml"

    def value(found: re.Match[str]) -> str:
        said = variables[found[1]]
        return said if not found[2] or said.isdecimal() else json.dumps(said)

    path.write_text(re.sub(r"\{\{ (\w+)( \| to_json)? \}\}", value, template))
    return load_config(path, WorkerConfig)


HOSTS = hosts("workers")


@pytest.mark.parametrize("host", sorted(HOSTS))
def test_a_node_of_the_inventory_gets_the_gpus_that_it_names(host: str, tmp_path: Path) -> None:
    own = HOSTS[host]
    assert own.keys() <= defaults().keys()
    found = {
        "slackwater_worker_node": host.split(".")[0],
        "slackwater_worker_url": "nats://bus.example:4222",
        "slackwater_worker_creds": "",
        "ansible_managed": "Ansible managed",
    }
    made = rendered(tmp_path, {**defaults(), **found, **own})
    assert (made.id, made.node) == (host.split(".")[0],) * 2
    counted = own.get("slackwater_worker_gpus", "auto")
    assert str(made.gpus) == counted
    kinds = {gpu.type for gpu in configured_gpus(made, NodeId(made.node))}
    assert kinds == ({own["slackwater_worker_gpu_type"]} if counted.isdecimal() else set())


def test_the_defaults_are_the_services_own() -> None:
    """But for what names the machine, the bus and its user."""
    service, role = WorkerConfig(), defaults()
    for key in ("slots", "gpus", "gpu_type", "cores", "memory_bytes", "state_dir"):
        assert role[f"slackwater_worker_{key}"] == str(getattr(service, key)), key


def test_the_example_has_nodes_with_gpus_of_several_types() -> None:
    kinds = {own.get("slackwater_worker_gpu_type") for own in HOSTS.values()}
    assert kinds == {"V100", "T4", None}


def test_the_unit_runs_the_service_with_the_file_that_the_role_writes() -> None:
    unit = (ROLE / "files/slackwater-worker.service").read_text()
    tasks = (ROLE / "tasks/main.yml").read_text()
    assert "slackwater run worker --config /etc/slackwater/worker.toml" in unit
    assert "dest: /etc/slackwater/worker.toml" in tasks
    assert "KillMode=process" in unit
