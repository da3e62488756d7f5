"""Machines of a lab: systemd as PID 1 in containers over one Debian root, each with a network of
its own, on a bridge that nothing else is on. It needs root, systemd-nspawn, debootstrap, iproute2.

What the lab cannot do: cgroup limits are not enforced in it, and all machines have one clock.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    "systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "openssh-server", "iproute2",
    "nftables", "util-linux", "procps", "ca-certificates", "curl", "libfaketime",
)  # fmt: skip
SUITE: Final = "bookworm"
STORE: Final = "/var/lib/slackwater-nats"
STORE_BYTES: Final = 256 * 2**20
BRIDGE: Final = "swlab"
NETWORK: Final = "10.77.0"
CGROUPS: Final = [Path("/sys/fs/cgroup") / each for each in ("", "unified", "systemd")]
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
    kind = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]
    root = cache / f"root-{SUITE}-{kind}"
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


@dataclass(frozen=True)
class Machine:
    name: str
    number: int
    folder: Path
    base: Path

    @property
    def address(self) -> str:
        return f"{NETWORK}.{10 + self.number}"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def store(self) -> Path:
        """The disk of its bus server, which is there after a loss of power."""
        return self.folder / "store"

    @property
    def network(self) -> str:
        return f"{BRIDGE}-{self.name}"

    def mount(self, key: str) -> None:
        """Lay this machine's own files over the base."""
        for part in ("upper", "work", "root", "store"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "tmpfs", str(self.store))
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

    def groups(self) -> list[Path]:
        """The control groups of its own that it starts in. Without them the machines would share
        one, and each one's systemd would remove the others' groups."""
        roots = [root for root in CGROUPS if (root / "cgroup.procs").exists()]
        return [root / self.network for root in roots]

    def boot(self) -> None:
        """Start it; it outlives this process."""
        log = os.open(self.folder / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        joins = ""
        for group in self.groups():
            group.mkdir(exist_ok=True)
            joins += f"echo $$ > {group}/cgroup.procs; "
        words = [
            "/bin/sh", "-c", joins + 'exec "$@"', self.name, "systemd-nspawn", "--quiet",
            f"--directory={self.root}", f"--machine={self.name}", "--register=no", "--keep-unit",
            "--boot", "--console=read-only", f"--bind={self.store}:{STORE}",
            f"--network-namespace-path=/run/netns/{self.network}",
            "--capability=CAP_NET_ADMIN,CAP_SYS_NICE,CAP_IPC_LOCK",
        ]  # fmt: skip
        moves = [(os.POSIX_SPAWN_DUP2, nothing, 0)]
        moves += [(os.POSIX_SPAWN_DUP2, log, to) for to in (1, 2)]
        pid = os.posix_spawn(words[0], words, os.environ, file_actions=moves, setsid=True)
        os.close(log)
        os.close(nothing)
        (self.folder / "pid").write_text(f"{pid}\n")

    @property
    def pid(self) -> int:
        """The pid of what contains the machine; 0: it does not run."""
        try:
            pid = int((self.folder / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return 0
        return pid if f"--machine={self.name}".encode() in command else 0

    def leader(self) -> int:
        """Return the pid of its PID 1."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        children = path.read_text().split() if self.pid else []
        if not children:
            raise RuntimeError(f"{self.name} does not run")
        return int(children[0])

    def running(self) -> int:
        """Return the pid of its PID 1; 0: it does not run, or is between two lives."""
        try:
            return self.leader()
        except (RuntimeError, OSError):
            return 0

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
        pid = self.pid
        if not pid:
            return
        with contextlib.suppress(RuntimeError, OSError):
            os.kill(self.leader(), signal.SIGKILL)
        until_s = time.monotonic() + 5
        while self.pid and time.monotonic() < until_s:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        (self.folder / "pid").unlink(missing_ok=True)

    def link(self, state: str) -> None:
        """Cut it from the others (`down`), or connect it again (`up`)."""
        run("ip", "link", "set", f"{BRIDGE}{self.number}", state)

    def remove(self) -> None:
        self.kill()
        for group in self.groups():
            for folder in sorted(group.rglob("*/"), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                group.rmdir()
        for mounted in (self.root, self.store):
            run("umount", "-l", str(mounted), check=False)
        run("ip", "netns", "del", self.network, check=False)
        run("ip", "link", "del", f"{BRIDGE}{self.number}", check=False)


def of(folder: Path, cache: Path, names: Sequence[str]) -> list[Machine]:
    return [Machine(n, 1 + i, folder / n, base_root(cache)) for i, n in enumerate(names)]


def start(folder: Path, made: Sequence[Machine]) -> None:
    """Start new machines, with the key `folder/key` for root."""
    stop(made)
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


def stop(made: Sequence[Machine]) -> None:
    """End them; nothing of them runs afterwards, their files stay."""
    for machine in made:
        machine.remove()
    run("ip", "link", "del", BRIDGE, check=False)
