"""pyverbs, looked for only when it is needed, and the RDMA ports that this host has.

pyverbs is Debian's (python3-pyverbs) and no dependency: it is imported as it is where the
interpreter sees it, or from Debian's folder where the interpreter is of the same version and only
does not look there (a virtual environment). What a host has is read from sysfs, which costs nothing
and needs no library. The numbers below are libibverbs' ABI.
"""

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from slackwater.common.base.errors import Unavailable

SYSFS: Final = Path("/sys/class/infiniband")
DEVICE_FILES: Final = Path("/dev/infiniband")
_DEBIAN: Final = Path("/usr/lib/python3/dist-packages/pyverbs")
_loading = threading.Lock()
_MODULES: Final = ("pd", "cq", "mr", "qp", "wr", "addr", "device", "pyverbs_error")

WRITE: Final = 0
WRITE_WITH_IMMEDIATE: Final = 1
READ: Final = 4
BIND_WINDOW: Final = 8

SIGNALED: Final = 2
INLINE: Final = 8

LOCAL_WRITE: Final = 1
REMOTE_WRITE: Final = 2
REMOTE_READ: Final = 4
WINDOW_BIND: Final = 16

SUCCESS: Final = 0
LOCAL_PAIR: Final = 2
FLUSHED: Final = 5
REMOTE_INVALID_REQUEST: Final = 9
REMOTE_ACCESS: Final = 10
REMOTE_OPERATION: Final = 11
STATUS: Final = {
    1: "a local length error",
    LOCAL_PAIR: "a local queue pair error",
    4: "a local protection error",
    FLUSHED: "the queue pair failed",
    6: "a window could not be bound",
    REMOTE_INVALID_REQUEST: "the peer's NIC calls the request invalid",
    REMOTE_ACCESS: "the peer's NIC refused the access",
    REMOTE_OPERATION: "the peer's NIC could not do it",
    12: "the peer's NIC does not answer",
    13: "the peer takes no messages",
}
"""Statuses of a work completion that a program of ours can see."""

RELIABLE_CONNECTION: Final = 2
STATE_ERROR: Final = 6
STATE_MASK: Final = 1
WINDOW_TYPE_2: Final = 2
CAP_WINDOW_2B: Final = 1 << 24
INFINIBAND_LINK: Final = 1
ROCE_V2: Final = 2


class Closable(Protocol):
    def close(self) -> None: ...


class MemoryKeys(Closable, Protocol):
    """A memory region as registered with a protection domain."""

    lkey: int
    rkey: int


class Completion(Protocol):
    wr_id: int
    status: int
    imm_data: int


class CompletionQueue(Closable, Protocol):
    def poll(self, num_entries: int) -> tuple[int, list[Completion]]: ...
    def req_notify(self) -> None: ...
    def ack_events(self, num_events: int) -> None: ...


class EventChannel(Closable, Protocol):
    def get_cq_event(self, expected_cq: CompletionQueue) -> None: ...


class NativePair(Closable, Protocol):
    qp_num: int

    def post_send(self, wr: Any) -> None: ...
    def post_recv(self, wr: Any) -> None: ...
    def modify(self, qp_attr: Any, mask: int) -> None: ...
    def to_init(self, qp_attr: Any) -> None: ...
    def to_rts(self, qp_attr: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Library:
    """The part of pyverbs that is used. Its classes have no types of their own."""

    open: Callable[..., Any]
    ProtectionDomain: Callable[..., Any]
    EventChannel: Callable[..., EventChannel]
    CompletionQueue: Callable[..., CompletionQueue]
    MemoryRegion: Callable[..., MemoryKeys]
    Window: Callable[..., Any]
    WindowBinding: Callable[..., Any]
    QueuePair: Callable[..., NativePair]
    Capacities: Callable[..., Any]
    InitAttributes: Callable[..., Any]
    Attributes: Callable[..., Any]
    SendRequest: Callable[..., Any]
    ReceiveRequest: Callable[..., Any]
    Piece: Callable[..., Any]
    Route: Callable[..., Any]
    Gid: Callable[..., Any]
    Handle: Callable[..., Any]
    Error: type[Exception]


def _find() -> Any:
    """Return the import specification of pyverbs, None where it is not installed."""
    spec = importlib.util.find_spec("pyverbs")
    if spec is not None:
        return spec
    # Compiled for one version of the interpreter: another's must not be tried.
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any(tag in entry.name for entry in _DEBIAN.glob("device.*.so")):
        return None
    return importlib.util.spec_from_file_location(
        "pyverbs", _DEBIAN / "__init__.py", submodule_search_locations=[str(_DEBIAN)]
    )


def library_found() -> bool:
    return "pyverbs" in sys.modules or _find() is not None


def load() -> Library:
    """Raises Unavailable where there is none, or it does not load."""
    with _loading:  # Its modules import one another: two threads in it at once were a crash.
        return _load()


def _load() -> Library:
    try:
        if "pyverbs" not in sys.modules:
            spec = _find()
            if spec is None:
                raise Unavailable("pyverbs is not installed (Debian: python3-pyverbs)")
            package = importlib.util.module_from_spec(spec)
            sys.modules["pyverbs"] = package
            spec.loader.exec_module(package)
        parts: dict[str, Any] = {
            name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES
        }
    except ImportError as error:
        sys.modules.pop("pyverbs", None)
        raise Unavailable(f"pyverbs does not load: {error}") from error
    return Library(
        open=parts["device"].Context,
        ProtectionDomain=parts["pd"].PD,
        EventChannel=parts["cq"].CompChannel,
        CompletionQueue=parts["cq"].CQ,
        MemoryRegion=parts["mr"].MR,
        Window=parts["mr"].MW,
        WindowBinding=parts["mr"].MWBindInfo,
        QueuePair=parts["qp"].QP,
        Capacities=parts["qp"].QPCap,
        InitAttributes=parts["qp"].QPInitAttr,
        Attributes=parts["qp"].QPAttr,
        SendRequest=parts["wr"].SendWR,
        ReceiveRequest=parts["wr"].RecvWR,
        Piece=parts["wr"].SGE,
        Route=parts["addr"].GlobalRoute,
        Gid=parts["addr"].GID,
        Handle=parts["addr"].AHAttr,
        Error=parts["pyverbs_error"].PyverbsError,
    )


# The devices of this host -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one RDMA device, and the network interface that it belongs to."""

    device: str
    number: int
    active: bool
    allowed: bool
    """Set where this process may open the device."""
    netdev: str = ""

    def __str__(self) -> str:
        return f"{self.device}/{self.number}"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses."""

    index: int
    text: str
    kind: int
    """ROCE_V2, or an older one."""


def ports(root: Path = SYSFS, files: Path = DEVICE_FILES) -> list[Port]:
    """Every port, by device and number. (A container sees the host's in sysfs, and often has no
    device file for it.)"""
    character: dict[str, Path] = {
        _read(entry / "ibdev"): files / entry.name
        for entry in (root.parent / "infiniband_verbs").glob("uverbs*")
    }
    return [
        Port(
            device.name,
            int(port.name),
            "ACTIVE" in _read(port / "state"),
            os.access(character.get(device.name, files / "absent"), os.R_OK | os.W_OK),
            _read(port / "gid_attrs" / "ndevs" / "0"),
        )
        for device in (sorted(root.iterdir()) if root.is_dir() else ())
        for port in sorted((device / "ports").glob("[0-9]*"))
    ]


def choose_gid(table: Sequence[Gid], local_ip: str = "") -> Gid | None:
    """The address to speak from: routable RoCE v2 of the interface that leads to the peer, then any
    of IPv4, then any of RoCE v2, then what there is."""

    def rank(gid: Gid) -> tuple[bool, bool, bool, int]:
        second = gid.kind == ROCE_V2
        return (
            not (second and mapped_ip(gid.text) == local_ip and bool(local_ip)),
            not (second and mapped_ip(gid.text)),
            not second,
            gid.index,
        )

    return min(table, key=rank, default=None)


def mapped_ip(gid: str) -> str:
    """The IPv4 address that a GID stands for, or nothing."""
    words = gid.split(":")
    if len(words) != 8 or words[:6] != ["0000"] * 5 + ["ffff"]:
        return ""
    packed = bytes.fromhex(words[6] + words[7])
    return ".".join(map(str, packed))


def why_not(root: Path = SYSFS, files: Path = DEVICE_FILES) -> str:
    """Return the reason why this host cannot use verbs, and the remedy; empty: it can be tried."""
    found = ports(root, files)
    names = ", ".join(map(str, found))
    lacks = []
    if not found:
        lacks.append(
            f"no RDMA device in {root} (a NIC and its driver; over any NIC: modprobe rdma_rxe, "
            "rdma link add rxe0 type rxe netdev eth0)"
        )
    elif not any(port.active for port in found):
        lacks.append(f"no port is active of {names} (ip link set <its interface> up)")
    elif not any(port.active and port.allowed for port in found):
        lacks.append(f"this process may not open {names} (read and write {files}/uverbs*)")
    if not library_found():
        lacks.append("pyverbs is not installed (Debian: python3-pyverbs)")
    return "; ".join(lacks)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # An entry that has no address answers EINVAL.
        return ""
