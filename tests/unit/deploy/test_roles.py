"""The roles of a cluster: what they write is a configuration that the services take, every variable
that they use is told, and systemd understands the units."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from slackwater.cli.config_file import Service, config_type
from slackwater.common.bus.users import BusUser
from slackwater.common.shell.config import load_config

ANSIBLE = Path(__file__).resolve().parents[3] / "deploy/ansible"
ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
SERVICES: tuple[Service, ...] = (
    "master", "controller", "profiler", "aggregator", "worker", "slabd",
)  # fmt: skip


def shared() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (ANSIBLE / "roles/slackwater_defaults/defaults/main.yml").read_text()
    )
    for role in ROLES:
        defaults = ANSIBLE / "roles" / role / "defaults/main.yml"
        if defaults.exists():
            found |= yaml.safe_load(defaults.read_text()) or {}
    return found


def rendered(template: str, folder: Path, **more: Any) -> str:
    (folder / "cluster_token").write_text("t" * 48 + "\n")
    values = {
        **shared(),
        "ansible_managed": "managed",
        "inventory_hostname": "h1",
        "group_names": [],
        "ansible_host": "10.0.0.1",
        "groups": {"bus": ["h1"], "slackwater": ["h1"]},
        "hostvars": {"h1": {"ansible_host": "10.0.0.1"}},
        "slackwater_url": "tls://10.0.0.1:4222",
        "slackwater_replicas": 1,
        "slackwater_secrets": str(folder),
        "slackwater_config": str(folder),
        "slackwater_root": "/opt/slackwater",
        "slackwater_release": "/opt/slackwater/releases/x",
        "slackwater_here": list(SERVICES),
        "lookup": lambda _, path: Path(path).read_text().strip(),
    } | more
    environment = jinja2.Environment(
        trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["to_json"] = lambda value: __import__("json").dumps(value)
    path = next((ANSIBLE / "roles").glob(f"*/templates/{template}"))
    return environment.from_string(path.read_text()).render(**values)


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_written_is_the_services_configuration(service: Service, tmp_path: Path) -> None:
    text = rendered("service.toml.j2", tmp_path, item=service, slackwater_settings={})
    path = tmp_path / f"{service}.toml"
    path.write_text(text)
    config = load_config(path, config_type(service))
    assert (config.id, config.replicas) == ("h1", 1)
    assert config.tls.ca == f"{tmp_path}/ca.pem"
    assert config.credentials.nkey == f"{tmp_path}/{service}.nk"
    assert config.faults() == []


def test_settings_of_the_inventory_are_keys_of_the_configuration(tmp_path: Path) -> None:
    settings = {"gpus": 8, "gpu_type": "V100", "slots": 3, "environment": ["PATH"]}
    text = rendered("service.toml.j2", tmp_path, item="worker", slackwater_settings=settings)
    (tmp_path / "worker.toml").write_text(text)
    config: Any = load_config(tmp_path / "worker.toml", config_type("worker"))
    assert (config.gpus, config.gpu_type, config.slots) == (8, "V100", 3)


def test_aggregators_of_machines_with_rdma_are_reached_by_it(tmp_path: Path) -> None:
    """And by nothing else that was not asked for; the link's budget is said where it is known."""
    text = rendered(
        "service.toml.j2", tmp_path, item="aggregator", slackwater_settings={},
        group_names=["rdma"], slackwater_rdma_device="mlx5_0/1", slackwater_rdma_address="10.1.0.1",
        slackwater_network_interface="ib0", slackwater_network_bytes_s=12_500_000_000,
    )  # fmt: skip
    (tmp_path / "aggregator.toml").write_text(text)
    config: Any = load_config(tmp_path / "aggregator.toml", config_type("aggregator"))
    assert (config.verbs_address, config.rdma_device) == ("10.1.0.1:7403", "mlx5_0/1")
    assert (config.network_interface, config.network_bytes_s) == ("ib0", 12_500_000_000)
    assert config.tcp_address == ""
    for service, opens in (("aggregator", True), ("worker", False)):
        unit = rendered("rdma.conf.j2", tmp_path, item=service)
        assert "LimitMEMLOCK=infinity" in unit
        assert ("DeviceAllow=char-infiniband_verbs rw" in unit) == opens


def test_every_service_has_what_its_unit_is_made_of() -> None:
    found = shared()
    for service in SERVICES:
        assert service in found["slackwater_groups"]
        assert service in found["slackwater_memory_max"]
        assert service in found["slackwater_oom_score"]
        assert service in found["slackwater_ports"]["metrics"]
        assert f"slackwater_{service}_settings" in found
        assert BusUser(f"{service}-h1").grants().publish


def test_every_group_of_the_inventory_is_a_services_or_the_bus() -> None:
    text = (ANSIBLE / "inventory.example.ini").read_text()
    groups = set(re.findall(r"^\[(\w+)\]$", text, re.M))
    others = {"bus", "slackwater", "swap", "monitoring", "rdma"}
    assert others | {*shared()["slackwater_groups"].values()} == groups


def test_only_builtin_modules_are_used() -> None:
    for path in sorted((ANSIBLE / "roles").glob("*/*/*.yml")):
        for module in re.findall(r"^ +([a-z_.]+\.[a-z_.]+):", path.read_text(), re.M):
            assert module.startswith("ansible.builtin."), (path, module)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    """With commands that this machine has: it looks for them."""
    texts = {
        f"slackwater-{service}.service": rendered("service.j2", tmp_path, item=service)
        for service in SERVICES
    }
    for name in ("nats-server.service", "nats-server-watch.service"):
        texts[name] = rendered(f"{name}.j2", tmp_path)
    for name in ("slackwater.target", "slackwater.slice"):
        texts[name] = rendered(f"{name}.j2", tmp_path)
    for name, text in texts.items():
        (tmp_path / name).write_text(re.sub(r"/opt/slackwater/current/bin/\S+", "/bin/true", text))
    done = subprocess.run(
        ("systemd-analyze", "verify", *(str(tmp_path / name) for name in sorted(texts))),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
