"""An opened RDMA device: its protection domains, what is registered there, what peers may reach.

A region is registered once per domain, without any remote right. What a peer may reach it reaches
through an `Exposure`: where the device has them, a memory window of type 2B, which is bound to the
one queue pair of that peer, to one range and to its rights, and ends at once when it is closed; all
channels then share one domain. On other devices every channel has a domain of its own, and an
exposure is a second registration there. Either way the NIC refuses a key of somebody else's.
docs/adr/0007 says why windows come first.

Registered memory is pinned, which counts against the limit `ulimit -l`.

Everything is closed by name and in order, and an open device is never left to the garbage
collector: pyverbs frees a context that is collected together with what was made from it twice.
"""

import atexit
import mmap
from typing import Any, Final

import numpy as np
import psutil

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Rejected, Unavailable
from slackwater.common.transport.region import Region, region_at
from slackwater.common.transport.verbs import library as ibv
from slackwater.common.transport.verbs.staging import Staging

_MTU_MAX: Final = 5
"""4096 bytes, as the ABI counts them."""
_open: "dict[Device, None]" = {}
"""Until their last user lets go, or the process ends."""


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Exposure:
    """The memory that one peer may reach. Closing it ends every access, also one under way."""

    def __init__(self, rkey: int, address: int, right: ibv.Closable, of: "Registration") -> None:
        self.rkey, self.address = rkey, address
        self._right: ibv.Closable | None = right
        self._of = of
        of.exposures.add(self)

    def close(self) -> None:
        right, self._right = self._right, None
        if right is not None:
            self._of.exposures.discard(self)
            right.close()


class Registration:
    """Memory that the NIC can use in one domain, pinned until it is closed."""

    def __init__(self, domain: "Domain", address: int, nbytes: int, what: str) -> None:
        """Raises Rejected."""
        self.domain, self.address, self.nbytes = domain, address, nbytes
        self.exposures: set[Exposure] = set()
        rights = ibv.LOCAL_WRITE | (ibv.WINDOW_BIND if domain.device.windows else 0)
        self._keys: ibv.MemoryKeys | None = domain.register(address, nbytes, rights, what)
        self.lkey = self._keys.lkey
        self.region: Region | None = None

    @property
    def keys(self) -> ibv.MemoryKeys:
        if self._keys is None:
            raise Unavailable("the memory was closed meanwhile")
        return self._keys

    def close(self) -> None:
        keys, self._keys = self._keys, None
        if keys is not None:
            self.domain.forget(self)
            for exposure in tuple(self.exposures):
                exposure.close()
            keys.close()


class Memory:
    """Anonymous memory of ours, registered: rings, and where unregistered buffers pass through."""

    def __init__(self, domain: "Domain", nbytes: int, what: str) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._map)
        self.registration = Registration(domain, address_of(self.view), nbytes, what)
        self.address, self.lkey = self.registration.address, self.registration.lkey

    def close(self) -> None:
        """Also where a slice of the view is out: the mapping then goes with it."""
        self.registration.close()
        self.view = memoryview(b"")


class Domain:
    """A protection domain: keys mean nothing outside it."""

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.handle: Any = device.library.ProtectionDomain(device.context)
        self._regions: dict[Region, Registration] = {}
        self._staging: tuple[Memory, Staging] | None = None

    def register(self, address: int, nbytes: int, rights: int, what: str) -> ibv.MemoryKeys:
        """Raises Rejected."""
        try:
            return self.device.library.MemoryRegion(self.handle, nbytes, rights, address=address)
        except self.device.library.Error as error:
            raise Rejected(
                f"{what}: {nbytes} bytes cannot be registered with {self.device.name}: {error}; "
                "pinned memory is bounded by `ulimit -l` (systemd: LimitMEMLOCK)"
            ) from error

    def registration(self, region: Region) -> Registration:
        """The region's, made at its first use and kept until the region closes. Blocks for about
        0.1 s per GB. Raises Rejected."""
        known = self._regions.get(region)
        if known is None:
            address = address_of(region.buffer)
            known = Registration(self, address, region.nbytes, f"region {region.label}")
            known.region = region
            self._regions[region] = known
            region.when_closed(known.close)
        return known

    def forget(self, registration: Registration) -> None:
        """Forget a registration that its region closes, or that ends with the device."""
        region = registration.region
        if region is not None:
            self._regions.pop(region, None)
            region.forget_when_closed(registration.close)

    def find(self, view: memoryview) -> tuple[int, int] | None:
        """(address, lkey) where the bytes lie in a region of this process, registering it; None
        where the NIC cannot use them. Other memory is not registered on the fly: its owner may free
        it, and its address may come back with other pages behind it."""
        address = address_of(view)
        region = region_at(address, len(view))
        if region is None:
            return None
        return address, self.registration(region).lkey

    @property
    def staging(self) -> tuple[Memory, Staging]:
        """Where bytes of unregistered buffers pass through; made at the first use."""
        if self._staging is None:
            memory = Memory(self, limits.VERBS_STAGING_BYTES, "staging")
            self._staging = memory, Staging(memory.view)
        return self._staging

    def expose_alone(self, of: Registration, address: int, nbytes: int, rights: int) -> Exposure:
        """Without windows: a registration of its own in this domain, which is one peer's."""
        keys = self.register(address, nbytes, rights | ibv.LOCAL_WRITE, "exposed memory")
        return Exposure(keys.rkey, address, keys, of)

    def release(self) -> None:
        """A channel's end: a domain of its own goes with it."""
        if self is not self.device.shared:
            self.close()
        self.device.release()

    def close(self) -> None:
        for registration in tuple(self._regions.values()):
            registration.close()
        if self._staging is not None:
            self._staging[0].close()
        self.handle.close()


class Device:
    """Opened, with one of its ports. `windows` None: where it has them. Closes with its last user;
    the maker is the first."""

    def __init__(self, port: ibv.Port, windows: bool | None = None) -> None:
        """Raises Unavailable."""
        self.library = ibv.load()
        self.port = port
        self.name = port.device
        try:
            self.context: Any = self.library.open(name=port.device)
            attributes = self.context.query_device()
            self.state = self.context.query_port(port.number)
        except self.library.Error as error:
            raise Unavailable(
                f"RDMA device {port.device} cannot be opened: {error} (who may use "
                "/dev/infiniband/uverbs*?)"
            ) from error
        has = bool(attributes.device_cap_flags & ibv.CAP_WINDOW_2B)
        if windows and not has:
            raise ConfigRejected(f"RDMA device {port.device} has no memory windows of type 2B")
        self.windows = has if windows is None else windows
        self.sends = min(limits.VERBS_SENDS, attributes.max_qp_wr)
        self.reads = max(1, min(limits.VERBS_READS, attributes.max_qp_rd_atom))
        self.mtu = min(self.state.active_mtu, _MTU_MAX)
        self.part_bytes = min(limits.TRANSFER_BYTES, self.state.max_msg_sz)
        self.shared = Domain(self) if self.windows else None
        self._users = 1
        _open[self] = None

    @property
    def closed(self) -> bool:
        return self._users == 0

    def hold(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if _open.pop(self, self) is None:
            self._users = 0
            if self.shared is not None:
                self.shared.close()
            self.context.close()

    def domain(self) -> Domain:
        """For a channel, which releases it and so long uses the device. Raises Unavailable."""
        self.hold()
        try:
            return Domain(self) if self.shared is None else self.shared
        except self.library.Error as error:
            self.release()
            raise Unavailable(f"{self.name} has no protection domain left: {error}") from error

    def gid(self, local_ip: str) -> ibv.Gid:
        """Read anew each time: addresses come and go. Raises Unavailable."""
        try:
            entries = self.context.query_gid_table(self.state.gid_tbl_len)
        except self.library.Error as error:
            raise Unavailable(f"{self.name} tells no GIDs: {error}") from error
        table = [
            ibv.Gid(entry.gid_index, entry.gid_str(), entry.gid_type)
            for entry in entries
            if entry.port_num == self.port.number
        ]
        found = ibv.choose_gid(table, local_ip)
        if found is None:
            raise Unavailable(
                f"{self.name}/{self.port.number} has no GID: give its interface an address"
            )
        return found


def pick_port(wanted: str, local_ip: str = "") -> ibv.Port:
    """`device` or `device/port`; empty: the port of the interface that has `local_ip`, or else the
    first. Raises ConfigRejected."""
    if why := ibv.why_not():
        raise ConfigRejected(f"transport verbs cannot be used here: {why}")
    known = ibv.ports()
    fit = [
        port
        for port in known
        if port.active and port.allowed and wanted in ("", port.device, str(port))
    ]
    if not fit:
        names = ", ".join(map(str, known))
        raise ConfigRejected(f"no active RDMA port {wanted!r} here, known are {names}")
    if len(fit) == 1 or not local_ip:
        return fit[0]
    here = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == local_ip for address in addresses)
    }
    return next((port for port in fit if port.netdev in here), fit[0])


@atexit.register
def _close_all() -> None:
    for device in tuple(_open):
        device.close()
