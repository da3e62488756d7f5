"""The journal of an elastic job: which decisions changed it, and when, in lines of JSON.

    {"iteration":40,"what":"resize","workers":2,"assignment":[[0,2],[2,4]], ..., "digest":"9f..."}

Only appended to, one write a line, so that ranks of one machine or folder may all write to it.
`digest` is that of the parameters after so many iterations: by it a replay finds out whether it is
at the same bits, and where it left them (Qiao's thesis, section 6.3).
"""

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.virtual import assigned
from slackwater.schemas.base import Record
from slackwater.schemas.jobs import CHECKPOINT_VARIABLE, JobSpec

FILE: Final = "journal.jsonl"
DIGEST_BYTES: Final = 16
REPLAY: Final = "SLACKWATER_REPLAY"
"""The variable that names the journal which a process is to follow, alone."""
REPLAYED: Final = "slackwater: the replay equals the journal"
"""Begins the line that such a process ends with."""
What = Literal["start", "resize", "pause", "resume", "move", "recovery", "batch", "end"]
"""`move`: to another machine, or a bucket to another aggregator; `recovery`: a process that died
began again; `batch`: m or s changed; `pause`: SIGTERM came, for a pause or for good."""


class Entry(Record, kw_only=True, frozen=True):
    """A line of the journal: how things were after `iteration` iterations, before the next one."""

    iteration: int
    what: What
    workers: int
    """Processes that compute the next iteration."""
    assignment: tuple[tuple[int, int], ...] = ()
    """Says for each process the first of its virtual ranks, and the one behind its last."""
    virtual_ranks: int
    seed: int
    m: int = 0
    """Examples of a micro-batch; 0: the program did not say."""
    s: int = 1
    """Micro-batches that a virtual rank adds up in one iteration."""
    rate: float = 0.0
    """The first group's learning rate."""
    rank: int = 0
    """The rank that wrote the line."""
    attempt: int = 0
    node: str = ""
    digest: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


def assignment(virtual_ranks: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Return each process's virtual ranks, as an entry has them."""
    held = (assigned(virtual_ranks, workers, rank) for rank in range(workers))
    return tuple((each.start, each.stop) for each in held)


def digest_of(arrays: Iterable[Any]) -> str:
    """Return the digest of the parameters, contiguous arrays in the order of the job's list."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for array in arrays:
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()


def default_folder(job: str) -> Path:
    """Return where a program of the job keeps its files: SLACKWATER_CHECKPOINT, else
    checkpoints/JOB, as its checkpoints."""
    return Path(os.environ.get(CHECKPOINT_VARIABLE) or Path("checkpoints", job))


def path_of(spec: JobSpec) -> Path:
    """Return where a submitted job's journal is, as this machine's folders have it."""
    return Path(spec.folder, spec.checkpoint or Path("checkpoints", spec.id), FILE)


class Journal:
    """The journal in a file, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Entry]:
        """Return all lines. Half a line at the end, of a machine that fell over, is left out.
        Raises Rejected at another one that cannot be read."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found = []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                found.append(_decode(line))
            except msgspec.DecodeError as error:
                raise Rejected(
                    f"{self.path}, line {number}: {error}; mend the line, or take the file away"
                ) from error
        return found

    def append(self, entry: Entry) -> None:
        """Write the entry, whole or not at all as other processes see it. Raises Rejected."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o644)
            try:
                os.write(descriptor, _encode(entry) + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise Rejected(
                f"the journal {self.path} cannot be written: {error.strerror}; give folder=, or "
                "`slackwater submit --checkpoint FOLDER`"
            ) from error


def last_run(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries from the last start on: a job that is run again begins anew."""
    starts = [at for at, entry in enumerate(entries) if entry.what == "start"]
    return list(entries[starts[-1] if starts else 0 :])


def first_what(entries: Sequence[Entry], iteration: int, node: str) -> What:
    """Say what it is that rank 0's process begins, from the journal as it finds it."""
    if iteration == 0:
        return "start"
    last = entries[-1] if entries else None
    if last is None or last.what != "pause":
        return "recovery"
    return "resume" if last.node == node else "move"


def unlike(expected: Entry, entry: Entry) -> str:
    """Say in what a replay differs from the journal at this place; empty: in nothing."""
    for name in ("virtual_ranks", "seed", "s", "rate", "m"):
        wanted, has = getattr(expected, name), getattr(entry, name)
        if wanted != has and not (name == "m" and 0 in (wanted, has)):
            return f"{name} is {has}, the journal says {wanted}"
    if expected.digest and expected.digest != entry.digest:
        return f"the parameters' digest is {entry.digest}, the journal says {expected.digest}"
    return ""
