"""The process around a shell, as the shell sees it: nothing, in a simulation."""

import os
import socket
from dataclasses import dataclass, field

from slackwater.common.shell.notify import SdNotify, stored_descriptors


@dataclass(frozen=True, slots=True)
class Process:
    host: str = "simulated"
    pid: int = 0
    notify: SdNotify = field(default_factory=SdNotify)
    stored: tuple[tuple[str, int], ...] = ()
    """Descriptors that the supervisor kept from this instance's former life: (name, fd)."""

    @classmethod
    def live(cls) -> "Process":
        notify = SdNotify.from_environment()
        return cls(socket.gethostname(), os.getpid(), notify, tuple(stored_descriptors()))
