"""Choose the transport of two parties: the best that both have and that connects.

Each party publishes (kind, address) pairs. Shared memory serves only parties of one host, so its
address carries the host's identity and is not even tried elsewhere. `probe` says for every kind,
also those that have no fabric here, what the host offers and why not more: `slackwater doctor`
prints it.
"""

import mmap
import os
import resource
import socket
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slackwater.common.base.errors import ConfigRejected, Retryable, SlackwaterError, Unavailable
from slackwater.common.transport import gpu_cuda
from slackwater.common.transport.base import Address, Channel, Fabric
from slackwater.common.transport.host import elsewhere, host_identity, split_identity
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tls import TlsEnds
from slackwater.common.transport.verbs.device import Device, pick_port
from slackwater.common.transport.verbs.fabric import VerbsFabric, VerbsTuning
from slackwater.common.transport.verbs.library import why_not

BEST_FIRST: Final = ("memory", "shm", "verbs", "tls", "tcp")
"""`memory` exists only inside one process; a kind that is not named comes last."""


def live_fabrics(
    forced: str | None = None,
    *,
    rdma_device: str = "",
    job_accounts: Iterable[int] = (),
    tls: TlsEnds | None = None,
) -> dict[str, Fabric]:
    """The fabrics of this host, best first. `forced` is `--transport`, `rdma_device` as
    VerbsTuning's, `job_accounts` may connect over shm too, `tls` is by which certificates. Raises
    ConfigRejected."""
    made: dict[str, Fabric] = {"shm": ShmFabric(allowed_uids=frozenset(job_accounts))}
    if not why_not():
        made["verbs"] = VerbsFabric(VerbsTuning(device=rdma_device))
    if tls is not None:
        made["tls"] = TcpFabric(tls=tls)
    made["tcp"] = TcpFabric()
    if forced is None:
        return made
    if forced not in made:
        known = {found.kind: found for found in probe()}
        why = known[forced].why if forced in known else f"known are {', '.join(known)}"
        raise ConfigRejected(f"transport {forced} cannot be used here: {why}")
    return {forced: made[forced]}


def choose(
    mine: Mapping[str, Fabric],
    offered: Sequence[tuple[str, Address]],
    *,
    forced: str | None = None,
    host: str | None = None,
) -> tuple[Fabric, Address]:
    """The best shared transport. Raises ConfigRejected when a forced kind is one that a side does
    not have at all, Unavailable (the peer may offer more later) when nothing leads there."""
    return candidates(mine, offered, forced=forced, host=host)[0]


def candidates(
    mine: Mapping[str, Fabric],
    offered: Sequence[tuple[str, Address]],
    *,
    forced: str | None = None,
    host: str | None = None,
) -> list[tuple[Fabric, Address]]:
    """All of them, best first, at least one: two hosts may both have RDMA devices and no RDMA
    network between them. Raises as `choose`."""
    here = host_identity() if host is None else host
    if forced is not None and forced not in mine:
        raise ConfigRejected(
            f"transport {forced} is forced, and this side has {', '.join(mine) or 'none'}"
        )
    found, reasons = [], []
    for kind, address in sorted(offered, key=lambda offer: rank(offer[0])):
        if forced is not None and kind != forced:
            reasons.append(f"{kind}: {forced} is forced")
        elif kind not in mine:
            reasons.append(f"{kind}: this side has {', '.join(mine) or 'none'}")
        elif kind == "shm" and (why := _unreachable(address, here)):
            reasons.append(f"{kind}: {why}")
        else:
            found.append((mine[kind], address))
    if not found:
        raise Unavailable(
            "no transport leads to the peer; it offers "
            + ("; ".join(reasons) if reasons else "none")
        )
    return found


async def connect_best(
    mine: Mapping[str, Fabric],
    offered: Sequence[tuple[str, Address]],
    hello: bytes,
    *,
    deadline_s: float,
    forced: str | None = None,
) -> tuple[Fabric, Channel]:
    """Connect by the best transport that answers; each has `deadline_s`. Raises what `choose`
    raises, and the last transport's error."""
    found = candidates(mine, offered, forced=forced)
    for number, (fabric, address) in enumerate(found, 1):
        try:
            return fabric, await fabric.connect(address, hello, deadline_s=deadline_s)
        except (Retryable, ConfigRejected):
            if number == len(found):
                raise
    raise AssertionError("candidates are at least one")


def rank(kind: str) -> int:
    return BEST_FIRST.index(kind) if kind in BEST_FIRST else len(BEST_FIRST)


def _unreachable(address: Address, here: str) -> str:
    """Return why a shm address cannot be used from here; empty: it can."""
    if why := elsewhere(address, here):
        return why
    _, path = split_identity(address)
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if stat.S_ISSOCK(mode) else f"{path} is not a socket"


# The transports of this host ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """One kind on this host. `why` names what was found where usable, what is missing where not."""

    kind: str
    usable: bool
    why: str


def probe() -> tuple[Found, ...]:
    """Tries each kind, for real where that costs nothing."""
    return (_probe_shm(), _probe_tcp(), _probe_verbs(), _probe_gpu())


def _probe_shm() -> Found:
    """A sealed memfd, sent over a Unix socket, mapped again: the same bytes must be there."""
    try:
        region = Region.create(mmap.PAGESIZE, "probe")
    except MemoryError as error:
        return Found("shm", False, f"no memfd: {error}")
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        socket.send_fds(left, [b"x"], [region.fileno()])
        _, fds, _, _ = socket.recv_fds(right, 1, 1)
        again = Region.adopt(fds[0], "probe")
        region.buffer[:5] = b"probe"
        same = bytes(again.buffer[:5]) == b"probe"
        again.close()
    except OSError as error:
        return Found("shm", False, f"descriptors do not pass a Unix socket: {error}")
    finally:
        left.close()
        right.close()
        region.close()
    if not same:
        return Found("shm", False, "a memfd that was passed shows other bytes")
    return Found("shm", True, f"memfd passed and mapped; host {host_identity()}")


def _probe_tcp() -> Found:
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            with socket.create_connection(address, timeout=1.0):
                return Found("tcp", True, "loopback connects")
    except OSError as error:
        return Found("tcp", False, f"loopback does not connect: {error}")


def _probe_verbs() -> Found:
    """Open the device, where there is one, and send nothing."""
    if why := why_not():
        return Found("verbs", False, why)
    try:
        device = Device(pick_port(""))
    except SlackwaterError as error:
        return Found("verbs", False, str(error))
    try:
        kept_apart = "memory windows" if device.windows else "a protection domain per channel"
        says = [f"{device.port} of {device.port.netdev} opens", f"keys by {kept_apart}"]
        says.append(f"address {device.gid('').text}")
    except SlackwaterError as error:
        return Found("verbs", False, str(error))
    finally:
        device.release()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        says.append(f"may pin {soft // 2**20} MiB (ulimit -l)")
    return Found("verbs", True, "; ".join(says))


def _probe_gpu() -> Found:
    """A memory kind, not a transport: an allocation is made, exported, and let go again."""
    usable, why = gpu_cuda.probe()
    return Found("gpu", usable, why)
