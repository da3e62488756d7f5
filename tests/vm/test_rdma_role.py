"""The role `slackwater_rdma`, played on a machine that has an RDMA device (Soft-RoCE)."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PLAY = ROOT / ".venv-lab/bin/ansible-playbook"
UNITS = Path("/etc/systemd/system")
pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PLAY.exists(), reason="no Ansible: make setup-lab"),
    pytest.mark.skipif(not os.environ.get("SLACKWATER_VM"), reason="it writes to /etc: a guest's"),
]


def play(folder: Path, **variables: object) -> tuple[dict[str, int], str]:
    """Play the role here. Return how many tasks were ok, changed, failed, and all that was said."""
    playbook = folder / "play.yml"
    playbook.write_text(
        "- hosts: localhost\n  connection: local\n  gather_facts: false\n"
        "  roles: [slackwater_rdma]\n"
    )
    told = {"slackwater_install_packages": False, "slackwater_restart": False, **variables}
    # The guest loads its modules itself: the host's modprobe knows another kernel's.
    told |= {"slackwater_rdma_modules": [], "ansible_host": "10.99.0.1"}
    done = subprocess.run(
        [str(PLAY), "-e", json.dumps(told), str(playbook)],
        env=os.environ | {
            "ANSIBLE_ROLES_PATH": str(ROOT / "deploy/ansible/roles"), "LC_ALL": "C.UTF-8",
            "ANSIBLE_NOCOLOR": "1", "HOME": str(folder),
        },
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    counts = re.findall(r"(\w+)=(\d+)", said.rpartition("PLAY RECAP")[2])
    return {name: int(count) for name, count in counts}, said


def test_it_prepares_the_machine_and_changes_nothing_the_second_time(tmp_path: Path) -> None:
    first, said = play(tmp_path)
    assert first["failed"] == 0, said
    assert first["changed"] > 0
    for service in ("aggregator", "worker"):
        unit = (UNITS / f"slackwater-{service}.service.d/20-rdma.conf").read_text()
        assert "LimitMEMLOCK=infinity" in unit
        assert ("DeviceAllow=char-infiniband_verbs rw" in unit) == (service == "aggregator")
    second, said = play(tmp_path)
    assert (second["failed"], second["changed"]) == (0, 0), said


def test_a_machine_whose_device_is_another_is_refused_with_those_that_it_has(
    tmp_path: Path,
) -> None:
    ended, said = play(tmp_path, slackwater_rdma_device="mlx5_7/1")
    assert ended["failed"] == 1
    assert "The RDMA device mlx5_7/1 has no port that is up" in " ".join(said.split())
    assert "rxe0" in said
