"""The cluster of the lab: three machines, and the playbooks that a user runs, on them.

python -m tests.lab up          # three machines, site.yml; they go on running
python -m tests.lab enter h1    # a shell of the operator on one of them
python -m tests.lab down
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.lab import machines
from tests.lab.machines import Machine

ROOT: Final = Path(__file__).resolve().parents[2]
ANSIBLE: Final = ROOT / "deploy/ansible"
HOME: Final = Path(os.environ.get("SLACKWATER_LAB_FOLDER", "/var/tmp/slackwater-lab"))
NAMES: Final = ("h1", "h2", "h3", "h4")
"""The fourth is not in the inventory at first."""
PROGRAMS: Final = ROOT / ".venv-lab/bin"
RECAP: Final = re.compile(r"^(\S+)\s+: (ok=.*)$", re.MULTILINE)
COMMAND: Final = "/usr/local/sbin/slackwater"


def missing() -> str:
    """Say what keeps the lab from running here; empty: nothing."""
    if not (PROGRAMS / "ansible-playbook").exists():
        return "ansible is not in .venv-lab (make setup-lab)"
    return machines.missing()


@dataclass(frozen=True)
class Played:
    """How a playbook ended: its counts for each host, and all that it printed."""

    hosts: Mapping[str, Mapping[str, int]]
    text: str
    took_s: float

    def total(self, count: str) -> int:
        return sum(counts.get(count, 0) for counts in self.hosts.values())


class PlaybookFailed(AssertionError):
    """A playbook ended with an error; the text is what it printed last."""


class Lab:
    def __init__(self, home: Path = HOME) -> None:
        self.home = home
        self.folder = home / "machines"
        self.machines = machines.of(self.folder, home / "cache", NAMES)

    def __getitem__(self, name: str) -> Machine:
        return self.machines[NAMES.index(name)]

    @property
    def wheelhouse(self) -> Path:
        return self.home / "wheelhouse.tar"

    @property
    def inventory(self) -> Path:
        return self.home / "inventory.ini"

    @property
    def secrets(self) -> Path:
        return self.home / "secrets"

    @property
    def url(self) -> str:
        return ",".join(f"tls://{self[name].address}:4222" for name in NAMES[:3])

    @property
    def up(self) -> bool:
        return all(machine.pid for machine in self.machines)

    def start(self) -> None:
        """Start empty machines and write what a user would: the inventory of the example."""
        machines.start(self.folder, self.machines)
        for name in ("secrets", "fetched"):
            shutil.rmtree(self.home / name, ignore_errors=True)
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        self.inventory.write_text(
            (ANSIBLE / "inventory.example.ini").read_text()
            + f"ansible_ssh_private_key_file={self.folder}/key\n"
            f"ansible_ssh_common_args={known}\n"
        )
        self.pack()

    def pack(self, tree: Path = ROOT, to: Path | None = None) -> None:
        """Build the wheelhouse of a checkout."""
        machines.run(sys.executable, str(tree / "deploy/wheelhouse.py"), str(to or self.wheelhouse))

    def play(
        self, playbook: str, *words: str, fails: bool = False, within_s: float = 1500.0, **more: Any
    ) -> Played:
        """Run a playbook as the guide says, with these variables.

        Raises:
            PlaybookFailed: it failed, or did not although it `fails`.
        """
        variables = {
            "slackwater_secrets": str(self.secrets),
            "slackwater_wheelhouse": str(self.wheelhouse),
            "slackwater_program": str(ROOT / ".venv/bin/slackwater"),
            "slackwater_backups": str(self.home / "backups"),
            "slackwater_install_packages": False,
            "slackwater_clients": [f"{machines.NETWORK}.1/32"],
            "slackwater_worker_settings": {"gpus": 2, "gpu_type": "fake"},
        } | more
        environment = os.environ | {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8",
            "ANSIBLE_LOCAL_TEMP": str(self.home / "ansible"),
        }  # fmt: skip
        began_s = time.monotonic()
        done = subprocess.run(
            ["ansible-playbook", "-i", str(self.inventory), "-e", json.dumps(variables), *words,
             playbook],
            cwd=ANSIBLE, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=within_s, check=False,
        )  # fmt: skip
        took_s = time.monotonic() - began_s
        if (done.returncode != 0) is not fails:
            raise PlaybookFailed(f"{playbook} ended with {done.returncode}:\n{done.stdout[-6000:]}")
        hosts = {
            host: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", counts)}
            for host, counts in RECAP.findall(done.stdout)
        }
        return Played(hosts, done.stdout, took_s)

    def ask(self, words: str, on: str = "h1", check: bool = True, within_s: float = 60.0) -> str:
        """Run a command of the operator's on a machine; return what it printed."""
        return self[on].shell(f"{COMMAND} {words}", check=check, timeout=within_s)

    def json(self, words: str, on: str = "h1", check: bool = True) -> Any:
        """Run a command with --json; return what it said."""
        return json.loads(self.ask(f"{words} --json 2>/dev/null", on, check))

    def journal(self, name: str) -> str:
        """Return what the machine's bus server said last, and what it has on its disk."""
        return f"{name}:\n" + self[name].shell(
            "journalctl -u nats-server -u nats-server-watch -n 40 --no-pager -o short-precise; "
            "df /var/lib/slackwater-nats; du -s /var/lib/slackwater-nats/*; date",
            check=False,
        )

    def told(self, job: str) -> str:
        """Return what is known of a job that does not go on: its story, what the services that
        serve it said last, and the connections of its ranks and of aggregators."""
        parts = [self.ask(f"job {job}", check=False)]
        for name in NAMES[:3]:
            said = self[name].shell(
                "journalctl -u slackwater-aggregator -u slackwater-controller -u slackwater-worker "
                "-n 40 --no-pager -o short-precise; ss -tnpo | grep -v 4222; "
                f"tail -n 30 /var/lib/slackwater/worker/jobs/{job}/*.log",
                check=False,
            )
            parts.append(f"{name}:\n{said}")
        return "\n".join(parts)

    def checks(self) -> list[dict[str, str]]:
        """Return what `slackwater doctor --whole` says; it exits with 1 where something is bad."""
        said = self.ask("doctor --whole --json", check=False)
        try:
            found: list[dict[str, str]] = json.loads(said)
        except ValueError:  # It could not reach the bus, and says so.
            return [{"what": "bus", "state": "bad", "why": said.strip()}]
        return found


def main(words: Sequence[str]) -> int:
    lab = Lab()
    match list(words):
        case ["up"]:
            if why := missing():
                sys.stderr.write(f"the lab cannot run here: {why}\n")
                return 1
            began_s = time.monotonic()
            lab.start()
            started_s = time.monotonic() - began_s
            played = lab.play("site.yml")
            sys.stdout.write(
                f"{played.text}\nthree machines after {started_s:.0f} s, site.yml took "
                f"{played.took_s / 60:.1f} min\nnow: python -m tests.lab enter h1\n"
            )
            return 0
        case ["play", playbook, *more]:
            sys.stdout.write(lab.play(playbook, *more).text)
            return 0
        case ["down"]:
            machines.stop(lab.machines)
            return 0
        case ["enter", name] if name in NAMES:
            leader = lab[name].leader()
            os.execvp("nsenter", ["nsenter", "-t", str(leader), "-a", "/bin/bash", "-l"])
    sys.stderr.write(__doc__ or "")
    return 2
