"""A lender's configuration."""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.common.base import limits
from slackwater.common.shell.config import SharedSecret
from slackwater.schemas.base import IdText

Bytes = Annotated[int, msgspec.Meta(ge=0)]
_PAGE: Final = 4096
Deadline = Annotated[float, msgspec.Meta(gt=0.0, le=60.0)]


class SlabdConfig(SharedSecret, kw_only=True, frozen=True):
    """Fields with unit, default and meaning."""

    id: IdText = "s1"
    node: str = ""
    """The machine, as others name it; empty: the host's name. Devices of this node borrow
    elsewhere."""
    slab_bytes: Annotated[int, msgspec.Meta(ge=limits.SLAB_BYTES_MIN, le=limits.SLAB_BYTES_MAX)] = (
        limits.SLAB_BYTES_DEFAULT
    )
    """SlabSize: the same on all machines of a cluster. A multiple of 4096."""
    headroom_bytes: Bytes = 0
    """Memory that stays free for the machine's own programs; 0: an eighth of it."""
    lend_bytes_max: Bytes = 0
    """Never more than this in slabs; 0: whatever HeadRoom leaves."""
    memory_bytes: Bytes = 0
    """Reckon with this much memory in all; 0: what the machine (or the cgroup) has."""
    quota_slabs: Annotated[int, msgspec.Meta(ge=0, le=limits.SLABS_HELD_MAX)] = 0
    """Slabs that one device may have here; 0: any number."""
    extra_candidates: Annotated[int, msgspec.Meta(ge=0, le=256)] = 10
    """E': so many more slabs than must go are asked for their activity (never more than E)."""
    check_s: Deadline = 0.1
    """A device that has not told its activity by then: its slabs count as idle."""
    evict_s: Deadline = 0.5
    """From EVICT to DONE; later, the slab is taken by force."""
    evict_later_s: Deadline = 30.0
    """The same, where the device has coded pages there that it must first make again elsewhere."""
    hold_s_max: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 30.0
    """A slab whose device is gone is kept for a claim at most this long."""
    pressure_max: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.1
    """Share of ten seconds in which something waited for memory (PSI): above, no slab is added and
    one is given up each second."""
    sample_s: Annotated[float, msgspec.Meta(gt=0.0, le=60.0)] = 1.0
    """Seconds between two looks at the machine's memory."""
    shm_path: str = ""
    """Unix socket for devices of this host; empty: `slabs.sock` in `state_dir`."""
    tcp_address: str = ""
    """host:port for devices of other hosts (port 0: any free one); empty: none."""
    tls_address: str = ""
    """The same, encrypted, with the `certificate` and `key` of `[tls]`; empty: none."""
    transport: Literal["", "shm", "tls", "tcp", "verbs"] = ""
    """Use this kind alone; empty: every kind that the host has."""

    def faults(self) -> list[str]:
        found = []
        if self.slab_bytes % _PAGE:
            found.append(f"slab_bytes {self.slab_bytes}: give a multiple of {_PAGE}")
        if self.transport in ("", "shm") and not self.shm_path and not self.state_dir:
            found.append("set shm_path, or state_dir for its socket")
        named = [kind for kind in ("tcp", "tls") if getattr(self, f"{kind}_address")]
        if named and self.transport != "shm" and not self.cluster_token:
            found.append(
                f"{named[0]}_address needs a cluster_token: without one, anybody on the network "
                "could borrow this machine's memory"
            )
        if self.transport in ("tcp", "verbs") and not self.tcp_address:
            found.append(f'transport = "{self.transport}" needs a tcp_address')
        if self.transport == "tls" and not self.tls_address:
            found.append('transport = "tls" needs a tls_address')
        return found + self.tls_faults(self.tls_address)
