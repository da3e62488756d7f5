"""Which transport two parties use: the best that both have and that leads somewhere.

Each party publishes (kind, address) pairs. Shared memory serves only parties of one host, so its
address carries the host's identity and is not even tried elsewhere. `probe` says for every kind,
also those that have no fabric here, what the host offers and why not more: `slackwater doctor`
prints it.
"""

import importlib
import importlib.util
import mmap
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slackwater.common.errors import ConfigRejected, Unavailable
from slackwater.common.transport.base import Address, Fabric
from slackwater.common.transport.host import host_identity, split_identity
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric

BEST_FIRST: Final = ("memory", "shm", "verbs", "tcp")
"""`memory` exists only inside one process; a kind that is not named comes last."""
_INFINIBAND: Final = Path("/sys/class/infiniband")


def live_fabrics(forced: str | None = None) -> dict[str, Fabric]:
    """The fabrics of this host, best first. `forced` is `--transport`. Raises ConfigRejected."""
    made: dict[str, Fabric] = {"shm": ShmFabric(), "tcp": TcpFabric()}
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
    here = host_identity() if host is None else host
    if forced is not None and forced not in mine:
        raise ConfigRejected(
            f"transport {forced} is forced, and this side has {', '.join(mine) or 'none'}"
        )
    reasons = []
    for kind, address in sorted(offered, key=lambda offer: _rank(offer[0])):
        if forced is not None and kind != forced:
            reasons.append(f"{kind}: {forced} is forced")
        elif kind not in mine:
            reasons.append(f"{kind}: this side has {', '.join(mine) or 'none'}")
        elif kind == "shm" and (why := _unreachable(address, here)):
            reasons.append(f"{kind}: {why}")
        else:
            return mine[kind], address
    raise Unavailable(
        "no transport leads to the peer; it offers " + ("; ".join(reasons) if reasons else "none")
    )


def _rank(kind: str) -> int:
    return BEST_FIRST.index(kind) if kind in BEST_FIRST else len(BEST_FIRST)


def _unreachable(address: Address, here: str) -> str:
    """Why a shm address cannot be used from here, or nothing."""
    host, path = split_identity(address)
    if host and host != here:
        return f"{path} is on another host"
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if stat.S_ISSOCK(mode) else f"{path} is no socket"


# What this host has -------------------------------------------------------------------------------


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
    """Device and library are looked for; no fabric of this kind exists, which is said too."""
    devices = sorted(entry.name for entry in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    has = [
        f"devices {', '.join(devices)}" if devices else f"no RDMA device in {_INFINIBAND}",
        "pyverbs is installed" if _importable("pyverbs") else "pyverbs is not installed",
        "no verbs fabric is built in",
    ]
    return Found("verbs", False, "; ".join(has))


def _probe_gpu() -> Found:
    """Memory on a CUDA device, through cupy."""
    if not _importable("cupy"):
        return Found("gpu", False, "cupy is not installed")
    try:
        cupy: Any = importlib.import_module("cupy")
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # cupy raises its own, and ImportError where a library is missing.
        return Found("gpu", False, f"cupy finds no device: {error}")
    if not count:
        return Found("gpu", False, "cupy finds no device")
    return Found("gpu", False, f"{count} CUDA devices; no fabric for their memory is built in")


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
