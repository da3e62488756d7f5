"""An aggregator's configuration."""

from typing import Annotated, Literal

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.accounts import AccountRange
from slackwater.common.shell.config import SharedSecret
from slackwater.schemas.base import IdText


class AggregatorConfig(SharedSecret, kw_only=True, frozen=True):
    """Fields with unit, default and meaning."""

    id: IdText = "a1"
    node: str = ""
    """The machine, as others name it; empty: the host's name."""
    cpu_share: Annotated[float, msgspec.Meta(ge=limits.CPU_SHARE_MIN, le=1024.0)] = 1.0
    """Cores of its slot: a task occupies it for its CPU time / cpu_share. 1 or more: no stretching.
    """
    shm_path: str = ""
    """Unix socket for parties of this host; empty: `slots.sock` in `state_dir`."""
    job_accounts: AccountRange = ""
    """User ids that may connect there too: the `accounts` of this host's worker service."""
    tcp_address: str = ""
    """host:port for parties of other hosts (port 0: any free one); empty: none."""
    tls_address: str = ""
    """The same, encrypted, with the `certificate` and `key` of `[tls]`; empty: none."""
    verbs_address: str = ""
    """The same for RDMA, where the host has a device: on the interface that leads to the others;
    empty: the host of `tcp_address`, any free port."""
    rdma_device: str = ""
    """`mlx5_0` or `mlx5_0/1`; empty: that of the interface of `verbs_address`, or the first."""
    transport: Literal["", "shm", "verbs", "tls", "tcp"] = ""
    """Use this kind alone; empty: every kind that the host has."""
    memory_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes that all regions together may take; 0: half of what the process may have (the machine's
    memory, or its cgroup's limit), or of the device's."""
    node_memory_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes that the regions of all aggregators of this node may take together, by which
    controllers place jobs; 0: each may fill its own."""
    migration_bytes_s: Annotated[int, msgspec.Meta(ge=0)] = 256 * 1024 * 1024
    """Bytes a second that copies of buckets to other hosts may take of the link, all together; 0:
    no cap. On one host nothing is copied."""
    network_interface: str = ""
    """The interface to other machines; empty: that of `tcp_address`, `tls_address` or
    `verbs_address`."""
    network_bytes_s: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes a second each way that gradients, copies and pages together are to take of this
    machine's link; 0: what the interface says it can carry, where it does."""
    device: Annotated[str, msgspec.Meta(pattern=r"^(|cuda|cuda:[0-9]+|fake|double)$")] = ""
    """Hold and fold buckets in a GPU's memory: `cuda` or `cuda:1`; `fake` plays one; empty: none.
    """
    restart_window_s: Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)] = 0.0
    """Seconds without a heartbeat for which its supervisor keeps its memory and starts it anew: its
    buckets wait for it so long. 0: the supervisor says itself what it does, as `slackwater up`."""
    telemetry_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 2.0
    """Seconds between two reports of what tasks cost."""
    charge_ns_per_byte: Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)] = 0.0
    """Nanoseconds of CPU time that a task is charged for each byte that its fold goes through: its
    parameters' bytes, once for each worker and twice for the update. A job's duty is an input then,
    and not of the moment; a fold that takes longer is counted (undercharged). 0: what is measured.
    """

    def faults(self) -> list[str]:
        found = []
        if self.transport in ("", "shm") and not self.shm_path and not self.state_dir:
            found.append("set shm_path, or state_dir for its socket")
        named = [kind for kind in ("tcp", "tls", "verbs") if getattr(self, f"{kind}_address")]
        if named and self.transport != "shm" and not self.cluster_token:
            found.append(
                f"{named[0]}_address needs a cluster_token: without one, anybody on the network "
                "could hand over regions"
            )
        return found + self.tls_faults(self.tls_address)
