"""The worker service's configuration."""

from typing import Annotated, Literal

import msgspec

from slackwater.common.base.accounts import AccountRange
from slackwater.common.shell.config import ServiceConfig
from slackwater.schemas.base import (
    NODE_GPUS_MAX,
    NODE_SLOTS_MAX,
    Cores,
    Count,
    IdText,
    MaybeId,
    NodeId,
)
from slackwater.schemas.gpus import FAKE, Gpu, GpuType


class WorkerConfig(ServiceConfig, kw_only=True, frozen=True):
    """Fields with unit, default and meaning."""

    id: IdText = "w1"
    node: Annotated[str, msgspec.Meta(max_length=63)] = ""
    """The machine that the processes run on, as the master's records name it; empty: `id`."""
    address: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """The address at which ranks on other nodes reach this machine; empty: its host name."""
    state_dir: str = "/var/lib/slackwater/worker"
    """jobs/<job>/rank<k>.{log,result.json,...}: outlives a kill of this service."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=NODE_SLOTS_MAX)] = 64
    """Processes of jobs without GPUs that may run at once."""
    gpus: Annotated[int, msgspec.Meta(ge=0, le=NODE_GPUS_MAX)] | Literal["auto"] = "auto"
    """GPUs that jobs may be given, numbered from 0 as CUDA numbers them; auto: those that NVIDIA's
    driver tells, with their types."""
    gpu_type: GpuType = FAKE
    """Type of the GPUs that `gpus` counts, for example V100; fake: they do not exist, and their
    jobs are told so."""
    rack: MaybeId = ""
    """The rack, or other group of well-connected machines, that this one belongs to."""
    cordoned: bool = False
    """Take no more jobs. Jobs without GPUs that run here go on, those with GPUs move to other nodes
    once they have saved."""
    cores: Cores = 0.0
    """Cores of CPU that jobs may be given; 0: all that this service may use."""
    memory_bytes: Count = 0
    """Bytes of main memory that jobs may be given; 0: all that this service may use."""
    stop_grace_s: Annotated[float, msgspec.Meta(gt=0.0, le=4.0)] = 3.0
    """Seconds between SIGTERM and SIGKILL; a drain has 5 s for all of it."""
    accounts: AccountRange = ""
    """User ids that nobody else has, `60000-60999`: each job runs under one of its own. For
    services that run as root; empty: jobs run under the service's account."""
    cgroups: bool = True
    """Give each rank a cgroup of its own where the host allows it (`slackwater doctor` says so), so
    that none of its processes is left behind; false: find them by a mark in their environment."""
    environment: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()
    """Further variables of this service's environment that its jobs inherit, beside PATH, LANG,
    CUDA_* and the like; a name may end in `*`. The bus's credentials never are."""
    warm: Literal["auto", "on", "off"] = "auto"
    """Fork ranks of `python train.py` from a process that has imported torch already, 300 MiB of
    memory; auto: where the node has GPUs, for jobs that hold some."""
    warm_imports: str = ""
    """Modules that it imports, with commas between them; empty: torch, torch._dynamo and
    slackwater.torch, or without torch numpy and slackwater.agent."""
    traffic: Literal["auto", "on", "off"] = "auto"
    """Watch what ranks of several without an Agent send, for their iterations, bytes and skew, as
    far as root, or CAP_NET_RAW and CAP_PERFMON, allows; auto: jobs with GPUs."""
    computing: Annotated[int, msgspec.Meta(ge=1, le=NODE_SLOTS_MAX)] = 1
    """Processes of jobs that take turns (`submit --by-turns`) which may compute at once. One of
    them is to use all cores that the node has for them; where one uses a single core, give as many
    as cores."""
    moving: Annotated[int, msgspec.Meta(ge=1, le=NODE_SLOTS_MAX)] = 1
    """Processes of such jobs that may move bytes at once, at full speed."""
    network_interface: str = ""
    """The interface to other machines, by which jobs that take turns move bytes; empty: that of
    `address`."""
    network_bytes_s: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes a second each way that are to be had of it; 0: what it says it can carry. Where that is
    known, another such job may move bytes beside the one whose turn it is, with what that leaves.
    """
    share_memory: bool = True
    """Let elastic programs that take turns here share the memory that they asked for together: more
    for one that waits for its data, less for one that does not; none has less than half of its own.
    """
    keep_jobs: bool = False
    """Leave job processes running when this service is stopped (a kill -9 always does)."""
    log_bytes_max: Annotated[int, msgspec.Meta(ge=8 * 1024**2, le=2**40)] = 16 * 1024**2
    """Bytes that are kept of what one rank prints; the oldest go first."""
    jobs_kept_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000
    """Ended jobs whose files are kept; the oldest go first, here and by the next two."""
    jobs_kept_s: Annotated[float, msgspec.Meta(gt=0.0)] = 1_209_600.0
    """How long they are kept."""
    jobs_kept_bytes: Annotated[int, msgspec.Meta(ge=0)] = 4 * 1024**3
    """Bytes of their files together."""
    venvs_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 16 * 1024**3
    """Bytes of unpacked virtual environments (`submit --venv`) that are kept for the next job; the
    ones used longest ago go first, one that a rank uses never."""


def configured_gpus(config: WorkerConfig, node: NodeId) -> tuple[Gpu, ...]:
    """List the node's GPUs as its configuration names them."""
    return tuple(
        Gpu(index=index, id=f"{node}/{index}", type=config.gpu_type)
        for index in range(0 if config.gpus == "auto" else config.gpus)
    )
