"""Machines of a lab: systemd as PID 1 in containers over one Debian root, each with a network of
its own, on a bridge that nothing else is on. It needs root, systemd-nspawn, debootstrap, iproute2.

What the lab cannot do: cgroup limits are not enforced in it, and all machines have one clock.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    "systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "openssh-server", "iproute2",
    "nftables", "util-linux", "procps", "ca-certificates", "curl",
)  # fmt: skip
SUITE: Final = "bookworm"
BRIDGE: Final = "swlab"
NETWORK: Final = "10.77.0"
NEEDED: Final = ("debootstrap", "systemd-nspawn", "ip", "ssh", "ssh-keygen")


def missing() -> str:
    """Say what keeps the lab from running here; empty: nothing."""
    if os.geteuid() != 0:
        return "it needs root"
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def run(*words: str, check: bool = True, timeout: float = 600.0) -> str:
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    if check and done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        )
    return done.stdout


def base_root(cache: Path) -> Path:
    """Return a Debian root with what machines have before anybody deploys; made once."""
    root = cache / f"root-{SUITE}"
    if (root / ".complete").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root))
    for unit in ("ssh.service", "ssh.socket"):
        run("chroot", str(root), "systemctl", "disable", unit, check=False)
    run("chroot", str(root), "systemctl", "enable", "ssh.service", check=False)
    run("chroot", str(root), "systemctl", "mask", "systemd-networkd-wait-online.service",
        "systemd-resolved.service", "systemd-timesyncd.service", check=False)  # fmt: skip
    (root / ".complete").touch()
    return root


@dataclass
class Machine:
    name: str
    number: int
    folder: Path
    base: Path
    process: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{10 + self.number}"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def network(self) -> str:
        return f"{BRIDGE}-{self.name}"

    def mount(self, key: str) -> None:
        """Lay this machine's own files over the base."""
        for part in ("upper", "work", "root"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        layers = f"lowerdir={self.base},upperdir={self.folder}/upper,workdir={self.folder}/work"
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))
        ssh = self.root / "root/.ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        (ssh / "authorized_keys").write_text(key)
        (self.root / "etc/hostname").write_text(self.name + "\n")
        (self.root / "etc/machine-id").write_text("")

    def connect(self) -> None:
        """Give it its network: one end in its namespace, the other on the bridge."""
        outside = f"{BRIDGE}{self.number}"
        run("ip", "netns", "add", self.network)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns",
            self.network)  # fmt: skip
        run("ip", "link", "set", outside, "master", BRIDGE, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            run("ip", "-n", self.network, *words)

    def boot(self) -> None:
        log = (self.folder / "console.log").open("ab")
        self.process = subprocess.Popen(
            [
                "systemd-nspawn", "--quiet", f"--directory={self.root}", f"--machine={self.name}",
                "--register=no", "--keep-unit", "--boot", "--console=read-only",
                f"--network-namespace-path=/run/netns/{self.network}",
                "--capability=CAP_NET_ADMIN,CAP_SYS_NICE,CAP_IPC_LOCK",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()

    def leader(self) -> int:
        """Return the pid of its PID 1."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split()
        if not children:
            raise RuntimeError(f"{self.name} does not run")
        return int(children[0])

    def enter(self, *words: str, check: bool = True, timeout: float = 120.0) -> str:
        """Run a command on the machine, as its root."""
        return run("nsenter", "-t", str(self.leader()), "-a", *words, check=check, timeout=timeout)

    def shell(self, script: str, check: bool = True, timeout: float = 120.0) -> str:
        return self.enter("/bin/sh", "-c", script, check=check, timeout=timeout)

    def until_up(self, within_s: float = 60.0) -> None:
        """Wait until it takes connections by ssh."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            with contextlib.suppress(RuntimeError, OSError):
                if "active" in self.enter("systemctl", "is-active", "ssh.service").split():
                    return
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} was not up within {within_s:g} s")

    def kill(self) -> None:
        """Cut its power."""
        if self.process is None:
            return
        with contextlib.suppress(RuntimeError, OSError):
            os.kill(self.leader(), signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait(10)
        self.process = None

    def link(self, state: str) -> None:
        """Cut it from the others (`down`), or connect it again (`up`)."""
        run("ip", "link", "set", f"{BRIDGE}{self.number}", state)

    def remove(self) -> None:
        self.kill()
        run("umount", "-l", str(self.root), check=False)
        run("ip", "netns", "del", self.network, check=False)
        run("ip", "link", "del", f"{BRIDGE}{self.number}", check=False)


@contextlib.contextmanager
def machines(folder: Path, cache: Path, names: Sequence[str]) -> Iterator[list[Machine]]:
    """Machines that run, with the key `folder/key` for root; nothing is left of them afterwards."""
    base = base_root(cache)
    made = [Machine(name, 1 + n, folder / name, base) for n, name in enumerate(names)]
    try:
        for machine in made:
            machine.remove()
        run("ip", "link", "del", BRIDGE, check=False)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        Path("/run/systemd/nspawn").mkdir(parents=True, exist_ok=True)
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for machine in made:
            machine.mount((folder / "key.pub").read_text())
            machine.connect()
            machine.boot()
        for machine in made:
            machine.until_up()
        yield made
    finally:
        for machine in made:
            machine.remove()
        run("ip", "link", "del", BRIDGE, check=False)
