"""Orders of the master to worker services, and what they answer and tell."""

from typing import Annotated, Final

import msgspec

from slackwater.schemas.base import (
    RUN_ATTEMPTS,
    WORKERS_MAX,
    Attempt,
    Count,
    IdText,
    Message,
    NodeId,
    Rank,
    Run,
    Text,
    Workers,
)
from slackwater.schemas.gpus import NodeAllocation, NodeGpuIds
from slackwater.schemas.jobs import CodeDigest, Environment, GraceSeconds, Program, VenvDigest
from slackwater.schemas.tenants import Tenant

USELESS_TO_RESTART: Final = 78
"""Exit code of a program that would end so again (EX_CONFIG): it is not started again."""


class PrepareWorkers(Message, kw_only=True, frozen=True, tag="worker.prepare"):
    """Master to worker service: keep room for these ranks, and see that their program can start.
    Answered by Prepared, or Refused; a gang is started once all of its nodes are prepared.
    Idempotent. The room is kept until the ranks start, are told to stop, or for `room_s`."""

    job: IdText
    attempt: Attempt
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=WORKERS_MAX)]
    """The ranks of this node."""
    program: Program
    folder: Text = ""
    env: Environment = msgspec.field(default_factory=dict)
    gpu_ids: NodeGpuIds = ()
    """The GPUs of `ranks`."""
    pack: CodeDigest = ""
    """The code that the program runs in; empty: it is there."""
    venv: VenvDigest = ""
    """The virtual environment that the program runs in; empty: the node's own Python."""


class Prepared(Message, kw_only=True, frozen=True, tag="worker.prepared"):
    """The ranks will find what they need."""

    host: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """The node's address, for ranks of other nodes."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """A port of the node on which the ranks of this attempt may meet."""
    code: CodeDigest = ""
    """Digest of the program's script and the Python files beside it; empty: it has none."""


RESERVED_S: Final = 12.0
"""Seconds that a node keeps room for ranks that are not started, and obeys the order to start them.
A master orders that, or gives them up, sooner."""
FETCH_S: Final = 90.0
"""Seconds that the nodes of a gang have more to fetch its code."""
FETCH_VENV_S: Final = 600.0
"""Seconds that they have more to fetch its virtual environment."""


def room_s(pack: str, venv: str) -> float:
    """Return the seconds that a node keeps room for ranks of these packs."""
    return RESERVED_S + fetch_s(pack, venv)


def fetch_s(pack: str, venv: str) -> float:
    """Return the seconds that nodes may take longer to prepare, some of them than others."""
    return FETCH_VENV_S if venv else FETCH_S if pack else 0.0


class StartWorkers(Message, kw_only=True, frozen=True, tag="worker.start"):
    """Master to worker service: run the job's program, one process per rank. Idempotent: a rank
    whose process of this number, or of a later one, was started already stays as it is.

    A rank's processes are numbered from 0: number `RUN_ATTEMPTS * attempt + n` is its n-th restart,
    started in this attempt of its job.
    """

    job: IdText
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=WORKERS_MAX)]
    """The ranks of this node."""
    workers: Workers
    """Ranks of the job, on all nodes."""
    program: Program
    attempts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=WORKERS_MAX)] = ()
    """Parallel to `ranks`: the number of each one's process; empty: 0."""
    folder: Text = ""
    """The program runs in it; empty: in the worker service's own."""
    attempt: Attempt = 0
    """The job's attempt; a master of version 0.2.0 leaves it out (see `job_attempt`)."""
    allocation: NodeAllocation = ()
    """All that the job holds, this node's part included: GPUs, or slots without GPUs. Ranks go to
    its nodes in this order."""
    gpu_ids: NodeGpuIds = ()
    """The GPUs of `ranks`, in their order, each of which gets an equal part; empty: none."""
    rendezvous: Annotated[str, msgspec.Meta(max_length=259)] = ""
    """host:port on which the ranks meet, their first one listening; empty: they need none."""
    grace_s: GraceSeconds = 0.0
    """Seconds from SIGTERM to SIGKILL; 0: the service's own `stop_grace_s`."""
    env: Environment = msgspec.field(default_factory=dict)
    pack: CodeDigest = ""
    venv: VenvDigest = ""
    tenant: Tenant = ""
    """Users who are held to one tenant read the ranks' logs if it is this one."""

    def __post_init__(self) -> None:
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError("ranks: one is named twice; name each rank once")
        if len(self.attempts) not in (0, len(self.ranks)):
            raise ValueError("attempts: give one for each of `ranks`, or none")
        if len(set(self.gpu_ids)) < len(self.gpu_ids):
            raise ValueError("gpu_ids: one is named twice; name each GPU once")
        if self.ranks and len(self.gpu_ids) % len(self.ranks):
            raise ValueError(
                f"gpu_ids: {len(self.gpu_ids)} GPUs for {len(self.ranks)} ranks; give each rank "
                "as many as the others"
            )

    @property
    def job_attempt(self) -> int:
        """The job's attempt, also where the sender knows only numbers of processes."""
        return max(self.attempt, min(self.attempts, default=0) // RUN_ATTEMPTS)

    def gpus_of(self, rank: int) -> NodeGpuIds:
        """The GPUs of one of `ranks`."""
        each = len(self.gpu_ids) // len(self.ranks)
        first = self.ranks.index(rank) * each
        return self.gpu_ids[first : first + each]


class StopWorkers(Message, kw_only=True, frozen=True, tag="worker.stop"):
    """Master to worker service: end all processes of this attempt of the job, and of those before.
    Answered once none is left."""

    job: IdText
    run: Run = 0
    attempt: Attempt = 0
    """A master of version 0.2.0 leaves it out (see `last_attempt`)."""
    grace_s: GraceSeconds = 0.0
    """Seconds from SIGTERM to SIGKILL; 0: the service's own `stop_grace_s`."""
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=WORKERS_MAX)] = ()
    """End these alone; empty: all."""

    @property
    def last_attempt(self) -> int:
        """The last attempt whose processes are to end; without pauses it was the run."""
        return max(self.attempt, self.run)


class WorkerExited(Message, kw_only=True, frozen=True, tag="worker.exited"):
    """Worker service to master (a request: answered Ok once it is stored)."""

    job: IdText
    rank: Rank
    node: NodeId
    code: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    """The rank's exit code; below 0: the signal that killed it."""
    code_known: bool = True
    """False: nobody was left to write the code, or it could not be written."""
    result: Text = ""
    """The result that it left; if it failed, the last line of its log."""
    attempt: Count = 0
    """The number of the rank's process, from 0, as in StartWorkers.attempts."""

    @property
    def job_attempt(self) -> int:
        """The attempt of its job that the process belonged to."""
        return self.attempt // RUN_ATTEMPTS
