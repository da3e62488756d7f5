"""The process around a shell, as the shell sees it: nothing, in a simulation."""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from slackwater.common.shell.notify import SdNotify, stored_descriptors

_SIMULATED: Final = "simulated"


@dataclass(frozen=True, slots=True)
class Process:
    host: str = _SIMULATED
    pid: int = 0
    began: str = ""
    """Boot and pid namespace of the host, and when the process began in it: with host and pid, no
    other process has these."""
    notify: SdNotify = field(default_factory=SdNotify)
    stored: tuple[tuple[str, int], ...] = ()
    """Descriptors that the supervisor kept from this instance's former life: (name, fd)."""

    @classmethod
    def live(cls) -> "Process":
        notify = SdNotify.from_environment()
        return cls(
            socket.gethostname(),
            os.getpid(),
            f"{_world()}/{psutil.Process().create_time():.2f}",
            notify,
            tuple(stored_descriptors()),
        )

    def life(self, instance: str) -> str:
        """Name this life of the instance as no other is named."""
        return f"{instance}@{self.host}/{self.pid}/{self.began}"

    def follows(self, instance: str, other: str) -> bool:
        """Say whether `other` is a life of the same instance, on this host, that is over."""
        name, _, where = other.rpartition("@")
        if name != instance or where == self.life("").removeprefix("@"):
            return False
        if self.host == _SIMULATED:
            return where.startswith(f"{_SIMULATED}/")
        try:
            host, pid, boot, namespace, began = where.split("/")
            if host != self.host:
                return False
            if f"{boot}/{namespace}" != _world():
                return boot != _boot()  # The machine was started anew since.
            return f"{psutil.Process(int(pid)).create_time():.2f}" != began
        except ValueError:
            return False
        except psutil.NoSuchProcess:
            return True


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]


def _world() -> str:
    """Name the boot of the kernel, and the namespace in which pids count."""
    return f"{_boot()}/{os.stat('/proc/self/ns/pid').st_ino}"
