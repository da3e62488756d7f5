"""What a shell knows of the process around it: nothing, in a simulation."""

import os
import socket
from dataclasses import dataclass, field

from slackwater.common.sdnotify import SdNotify


@dataclass(frozen=True, slots=True)
class Process:
    host: str = "simulated"
    pid: int = 0
    notify: SdNotify = field(default_factory=SdNotify)

    @classmethod
    def live(cls) -> "Process":
        return cls(socket.gethostname(), os.getpid(), SdNotify.from_environment())
