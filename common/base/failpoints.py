"""Named places at which a test kills a process, to prove that nothing acknowledged is lost.

A failpoint does nothing unless the environment arms it:

    SLACKWATER_FAILPOINTS="controller.persist.before=kill@3,aggregator.fold.mid=kill@random(7)"

`kill@N` sends SIGKILL to the own process at the N-th time it passes, `stop@N` SIGSTOP; with
`random(SEED)` N is drawn from 1 to RANDOM_HITS_MAX. All names are here, so that the tests can
enumerate them; arming an unknown one is an error.
"""

import os
import random
import re
import signal
from typing import Final

from slackwater.common.base.errors import ConfigRejected

VARIABLE: Final = "SLACKWATER_FAILPOINTS"
RANDOM_HITS_MAX: Final = 20

SERVICES: Final = ("master", "controller", "aggregator", "profiler", "worker", "slabd", "device")
SHELL_POINTS: Final = (
    "epoch.before",  # the epoch record is about to be written
    "epoch.after",  # it is written, the core has not recovered yet
    "persist.before",  # a step's records are about to be written
    "persist.after",  # they are durable, nothing was said yet
    "publish.after",  # a fact was handed to the bus
    "reply.before",  # an answer is about to be handed to the bus
    "reply.after",  # it was handed over
    "request.before",  # a command to another service is about to be sent
    "request.after",  # its answer is here, the core has not seen it
    "drain.before",  # SIGTERM or drain arrived
)
"""Points that every service has: `<service>.<point>`."""
OWN_POINTS: Final = (
    "aggregator.host.after",
    "aggregator.fold.before",
    "aggregator.fold.mid",
    "aggregator.fold.after",
    "aggregator.copy.before",
    "aggregator.copy.mid",
    "aggregator.copy.after",
    "aggregator.checkpoint.before",
    "aggregator.checkpoint.after",
    "worker.start.before",
    "worker.start.after",
)

_known: set[str] = {f"{s}.{p}" for s in SERVICES for p in SHELL_POINTS} | set(OWN_POINTS)

_armed: dict[str, tuple[int, signal.Signals]] = {}
_hits: dict[str, int] = {}
_ENTRY = re.compile(
    r"(?P<name>[a-z0-9_.-]+)=(?P<action>kill|stop)@((?P<hit>\d+)|random\((?P<seed>\d+)\))"
)


def of_shell(service: str) -> tuple[str, ...]:
    """The failpoints that a service has because it runs in the shell."""
    return tuple(f"{service}.{point}" for point in SHELL_POINTS)


def register(*names: str) -> None:
    """Make further names known (a test's own service)."""
    _known.update(names)


def names() -> tuple[str, ...]:
    """Every failpoint there is."""
    return tuple(sorted(_known))


def arm(text: str) -> None:
    """Arm what `text` (the variable's value) asks for, instead of what was armed before."""
    _armed.clear()
    _hits.clear()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _ENTRY.fullmatch(part)
        if found is None:
            raise ConfigRejected(
                f"{VARIABLE}: {part!r} is not NAME=kill@N, NAME=stop@N or NAME=kill@random(SEED)"
            )
        name = found["name"]
        if name not in _known:
            raise ConfigRejected(
                f"{VARIABLE}: there is no failpoint {name!r}: {', '.join(names())}"
            )
        if found["hit"] is not None:
            hit = int(found["hit"])
        else:
            hit = random.Random(f"{name}/{found['seed']}").randint(1, RANDOM_HITS_MAX)
        _armed[name] = (hit, signal.SIGKILL if found["action"] == "kill" else signal.SIGSTOP)


def arm_from_environment() -> None:
    arm(os.environ.get(VARIABLE, ""))


def any_armed() -> bool:
    return bool(_armed)


def failpoint(name: str) -> None:
    """The process passes `name`."""
    if _armed and name in _armed:
        _hit(name)


def _hit(name: str) -> None:
    _hits[name] = count = _hits.get(name, 0) + 1
    at, action = _armed[name]
    if count == at:
        os.kill(os.getpid(), action)
