"""Named places at which a test kills a process, delays it or has it fail, to prove that nothing
acknowledged is lost.

A failpoint does nothing unless the environment arms it:

    SLACKWATER_FAILPOINTS="controller.persist.before=kill@3,master.put.after=error@2"

At the N-th time that the process passes, `kill@N` sends it SIGKILL and `stop@N` SIGSTOP,
`delay(S)@N` holds it for S seconds, loop and all, and `error@N` has the work fail there as it may
fail by itself (FAILING). With `random(SEED)` N is drawn from 1 to RANDOM_HITS_MAX. All names are
here, so that the tests can enumerate them; arming an unknown one is an error.
"""

import errno
import os
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final

from slackwater.common.base.errors import ConfigRejected, Unavailable

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
    "recover.mid",  # the records are read, the first epoch record is not written
    "recover.after",  # the epoch record of one bucket is written
    "put.before",  # a record is about to be sent to the store
    "put.after",  # the store has it, nobody was told
    "witness.before",  # the store has it, the own file does not say so
    "witness.after",  # the file says so, nobody was told
)
"""Points that every service has: `<service>.<point>`."""
LEASED: Final = ("master",)
"""Services of which one instance leads, by a lease."""
LEASE_POINTS: Final = (
    "lease.before",  # the lease is about to be taken
    "lease.after",  # it is taken
    "renew.before",  # it is about to be renewed
    "renew.after",
    "release.before",  # an instance that ends is about to give it back
)
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
    "worker.intend.before",  # a rank is to be started, no file of it is there
    "worker.start.before",  # its files are there, its process is not
    "worker.start.after",  # its process runs
    "worker.exit.before",  # it has ended, the core does not know
    "worker.forget.before",  # the master knows of its end, its files do not say so
    "worker.forget.after",
    "slabd.make.before",  # memory is about to be made
    "slabd.make.after",  # it is made and kept, the core does not know
    "slabd.lend.before",  # a slab is about to be a device's, by its trailer
    "slabd.lend.after",  # the trailer says so, the device does not know
    "slabd.clear.before",  # a returned slab is about to be fenced off and cleared
    "slabd.free.before",  # memory is about to be given back to the machine
    "slabd.free.after",  # it is gone, the store still names it
    "device.open.before",  # a lender has lent a slab, its memory is not opened
    "device.admit.before",  # it is opened, no page is in it yet
    "device.admit.after",
    "device.leave.before",  # a slab is about to be given back, no request uses it any more
    "device.leave.after",  # it is closed, the lender was not told
    "device.sync.before",  # a client's flush: all is in the file, and the disk was not asked
    "device.sync.after",  # the disk has it, the client was not told
    "device.discard.before",  # a range of the file is about to be let go
    "profiler.measure.before",  # the host's load is about to be measured
)

_known: set[str] = {
    *(f"{service}.{point}" for service in SERVICES for point in SHELL_POINTS),
    *(f"{service}.{point}" for service in LEASED for point in LEASE_POINTS),
    *OWN_POINTS,
}


def _away(name: str) -> Exception:
    return Unavailable(f"failpoint {name}")


def _disk(name: str) -> Exception:
    return OSError(errno.EIO, f"failpoint {name}")


FAILING: Final[Mapping[str, Callable[[str], Exception]]] = {
    "recover.mid": _away,
    "recover.after": _away,
    "put.before": _away,
    "put.after": _away,
    "renew.before": _away,
    "witness.before": _disk,
    "worker.intend.before": _disk,
    "worker.start.before": _disk,
    "device.open.before": _away,
    "device.sync.before": _disk,
    "device.discard.before": _disk,
    "slabd.make.before": lambda name: MemoryError(f"failpoint {name}"),
}
"""Points, or what they are called after their service, at which the work may fail by itself."""

_armed: dict[str, tuple[int, str, float]] = {}
"""Point -> at which time, what, and for how many seconds."""
_hits: dict[str, int] = {}
_ENTRY = re.compile(
    r"(?P<name>[a-z0-9_.-]+)=(?P<action>kill|stop|error|delay\((?P<s>\d+(\.\d+)?)\))"
    r"@((?P<hit>\d+)|random\((?P<seed>\d+)\))"
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
                f"{VARIABLE}: {part!r} is not NAME=ACTION@N or NAME=ACTION@random(SEED); actions "
                "are kill, stop, error and delay(SECONDS)"
            )
        name = found["name"]
        if name not in _known:
            raise ConfigRejected(
                f"{VARIABLE}: there is no failpoint {name!r}: {', '.join(names())}"
            )
        if found["action"] == "error" and failure(name) is None:
            raise ConfigRejected(f"{VARIABLE}: nothing can fail by itself at {name}")
        if found["hit"] is not None:
            hit = int(found["hit"])
        else:
            hit = random.Random(f"{name}/{found['seed']}").randint(1, RANDOM_HITS_MAX)
        _armed[name] = hit, found["action"].partition("(")[0], float(found["s"] or 0.0)


def failure(name: str) -> Callable[[str], Exception] | None:
    """Return what makes the error that may arise at a point; None: none may."""
    return FAILING.get(name) or FAILING.get(name.partition(".")[2])


def arm_from_environment() -> None:
    arm(os.environ.get(VARIABLE, ""))


def any_armed() -> bool:
    return bool(_armed)


def failpoint(name: str) -> None:
    """The process passes `name`. Raises what FAILING says, where a test asked for that."""
    if _armed and name in _armed:
        _hit(name)


def _hit(name: str) -> None:
    _hits[name] = count = _hits.get(name, 0) + 1
    at, action, seconds = _armed[name]
    if count != at:
        return
    make = failure(name)
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(seconds)
        case "error" if make is not None:
            raise make(name)
