"""The options of one device, and what is refused of them."""

import math
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell.config import DEFAULT_METRICS_ADDRESS
from slackwater.memory.control.spans import HOT
from slackwater.memory.prefetch.prefetch import WINDOW_MAX
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas.base import ID_PATTERN


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Say what a device is to be. `slab_bytes` 0: what the lenders of the cluster have."""

    id: str
    size_bytes: int
    socket: Path | None
    """None: no NBD server, the device is used within this process."""
    backup: Path
    node: str = ""
    slab_bytes: int = 0
    resilience: str = "disk"
    hot: float = HOT
    cold: float = 0.0
    hold_s: float = 10.0
    direct: bool = False
    delay_s: float = 0.0
    swap: bool = False
    """Prepare for serving this machine's own swap: memory locked, writeback not throttled, room in
    the backup file taken now."""
    transport: str | None = None
    token: str = ""
    prefetch: int = WINDOW_MAX
    """Requests of a client that are fetched ahead at once, at most; 0: none. It is for pages behind
    a channel: where slabs are mapped (shm) it has nothing to do."""
    network_interface: str = ""
    """The interface to other machines; empty: the only one beside the loopback."""
    network_bytes_s: int = 0
    """Bytes a second each way that gradients, copies and pages together are to take of this
    machine's link; 0: what the interface says it can carry, where it does. Pages that are put back
    leave room for the others."""
    metrics_port: int = 0
    """Prometheus on this port; 0: none, -1: any free one."""
    metrics_address: str = DEFAULT_METRICS_ADDRESS


def node_of(options: DeviceOptions) -> str:
    return options.node or socket.gethostname().split(".")[0]


def check_options(options: DeviceOptions, slab_bytes: int) -> None:
    """Refuse what would fail later, or on the bus, or unseen. Raises ConfigRejected."""
    for name, value in (("id", options.id), ("node", node_of(options))):
        if re.fullmatch(ID_PATTERN, value) is None:
            raise ConfigRejected(
                f"{name} {value!r}: give letters, digits, - and _, at most 63 in all, a letter "
                "or digit first"
            )
    path = options.socket
    if path is not None and not path.parent.is_dir():
        raise ConfigRejected(f"socket {path}: folder {path.parent} does not exist; name another")
    if path is not None and path.exists() and not path.is_socket():
        raise ConfigRejected(f"socket {path} exists and is not a socket: name another path")
    if options.size_bytes % PAGE_BYTES or options.size_bytes <= 0:
        raise ConfigRejected(f"size {options.size_bytes}: give a multiple of {PAGE_BYTES}")
    known = limits.SLAB_BYTES_MIN <= slab_bytes <= limits.SLAB_BYTES_MAX
    if slab_bytes % PAGE_BYTES or not known:
        raise ConfigRejected(
            f"slab size {slab_bytes}: give what the lenders have, a multiple of {PAGE_BYTES} from "
            f"{limits.SLAB_BYTES_MIN} to {limits.SLAB_BYTES_MAX}"
        )
    if not (math.isfinite(options.hot) and options.hot >= 0):
        raise ConfigRejected(f"hot {options.hot:g}: give page I/O per second, 0 or more")
    if options.cold and not 0 <= options.cold < options.hot:
        raise ConfigRejected(
            f"cold {options.cold:g}: give less than hot, which is {options.hot:g}, or 0 for never"
        )
    if not 0 <= options.prefetch <= limits.AHEAD_WINDOW_MAX:
        raise ConfigRejected(f"prefetch {options.prefetch}: give 0 to {limits.AHEAD_WINDOW_MAX}")
