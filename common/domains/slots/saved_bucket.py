"""A bucket's parameters and optimiser states as a file keeps them, and back into a region.

A checkpoint of a job's aggregators has a part for each bucket (common/base/checkpoint_folder.py):
an .npz of float32 arrays, as numpy.load reads it, without pickle:

    about           the JSON of an `About`, as bytes
    parameters      flat: the bucket's elements, in the order of the job's tensors
    state_0 ...     as many as the rule has, each as long (rules.py says which is which)

An update has some pieces of a bucket alone, one after another in each array, and beside them

    spans           [first, end) of each, int64, (pieces, 2)

Its arrays may be of bfloat16, as uint16: numpy knows no such type.

A job that begins with it may have other buckets: an element's place in the job's list of tensors
is what counts.
"""

import struct
import tokenize
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from zipfile import BadZipFile

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.checkpoint_folder import (
    BUCKETS,
    CheckpointFolder,
    Part,
    newest_of_buckets,
)
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.layout import bucket_start
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import RULES, Floats, narrow, widen
from slackwater.common.transport.gpu import copy_into
from slackwater.schemas.jobs import Consistency
from slackwater.schemas.placement import Tensors
from slackwater.schemas.tensors import TensorSpec

_UNREADABLE: Final = (
    OSError, ValueError, KeyError, EOFError, MemoryError, SyntaxError, RuntimeError, struct.error,
    tokenize.TokenError, zlib.error, BadZipFile, msgspec.MsgspecError,
)  # fmt: skip
"""Raised by readers of a file that is none of ours, or has other bytes than were written."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a part, beside its arrays."""

    job: str
    tensors: Tensors
    """The job's whole list."""
    first: int
    """The place of the part's first element among those of all tensors."""
    elements: int
    version: int
    """Updates that the parameters have had."""
    updates: int
    """Updates that the states have had: bias corrections count them."""
    rule: str
    consistency: Consistency
    applied: tuple[int, ...]
    """The newest iteration of each rank that is in them, where the version does not say it."""


@dataclass(frozen=True, slots=True)
class BucketCopy:
    """A bucket at one version, in memory of its own."""

    about: About
    parameters: Floats
    states: tuple[Floats, ...]

    @classmethod
    def of(cls, slots: SlotRegion, version: int) -> "BucketCopy":
        """Copy what the region has of `version`, its newest or the one before. Whoever calls it
        sees to it that nothing is folded into these buffers meanwhile."""
        plan = slots.plan
        synchronous = plan.consistency == "synchronous"
        about = About(
            job=plan.job,
            tensors=slots.tensors,
            first=0,
            elements=slots.bucket.elements,
            version=version,
            updates=version - slots.state_since,
            rule=plan.update.name,
            consistency=plan.consistency,
            applied=() if synchronous else tuple(slots.applied_words(version).tolist()),
        )
        arrays = [slots.parameters(version)]
        arrays += [slots.state(version, index) for index in range(RULES[plan.update.name].states)]
        parameters, *states = (np.array(slots.to_host(each), np.float32) for each in arrays)
        return cls(about, parameters, tuple(states))

    @property
    def bytes_each(self) -> int:
        """Bytes that it has of each element."""
        return 4 * (1 + len(self.states))

    def write(
        self,
        path: Path,
        tensors: Tensors,
        first: int,
        spans: NDArray[np.int64] | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        """Write it as the part from element `first` on of the job's whole list of tensors; `spans`:
        only these pieces of it, as an update, `rounded` to bfloat16 or not. Raises OSError."""
        arrays: dict[str, Any] = {"parameters": self.parameters}
        arrays |= {f"state_{index}": state for index, state in enumerate(self.states)}
        if spans is not None:
            arrays = {
                name: np.concatenate([each[begin:end] for begin, end in spans])
                for name, each in arrays.items()
            }
            if rounded:
                arrays = {name: narrow(each) for name, each in arrays.items()}
            arrays["spans"] = spans
        whole = msgspec.structs.replace(self.about, tensors=tensors, first=first)
        about = np.frombuffer(msgspec.json.encode(whole), np.uint8)
        with path.open("wb") as file:
            np.savez(file, about=about, **arrays)


def copy_bytes(rule: str, elements: int) -> int:
    """Return the size of a copy's arrays."""
    return 4 * elements * (1 + RULES[rule].states)


class Read(NamedTuple):
    """A file's content: the pieces that it has, [first, end) within its bucket, and for each the
    parameters and states."""

    about: About
    pieces: list[tuple[int, int, list[Floats]]]


def read_part(path: Path) -> Read:
    """Read a set's part, which is one piece, or an update. Raises Rejected where the file has not
    what such a part has."""
    about = read_about(path)
    names = ["parameters", *(f"state_{index}" for index in range(RULES[about.rule].states))]
    with _opened(path) as arrays:
        found = [arrays[name] for name in names]
        spans = arrays["spans"] if "spans" in arrays else np.array([[0, about.elements]])
        if "spans" in arrays:
            found = [widen(each) if each.dtype == np.uint16 else each for each in found]
    if spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype != np.int64:
        raise Rejected(f"{path}: its spans are {spans.dtype} {list(spans.shape)}, not [first, end)")
    low, high = spans[:, 0], spans[:, 1]
    inside = ((low >= 0) & (low < high) & (high <= about.elements)).all()
    count = int((high - low).sum())
    if not inside or any(each.dtype != np.float32 or each.shape != (count,) for each in found):
        raise Rejected(f"{path} has not the {count} float32 elements that it says")
    pieces: list[tuple[int, int, list[Floats]]] = []
    at = 0
    for first, end in spans.tolist():
        upto = at + end - first
        pieces.append((first, end, [each[at:upto] for each in found]))
        at = upto
    return Read(about, pieces)


def read_about(path: Path) -> About:
    """Raises Rejected where the file has not what a part has."""
    with _opened(path) as arrays:
        about = msgspec.json.decode(arrays["about"].tobytes(), type=About)
        if about.rule not in RULES:
            raise ValueError(f"rule {about.rule} is not known")
        return about


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except _UNREADABLE as error:
        raise Rejected(f"{path} is not a part of a checkpoint: {error}") from error


class SavedJob:
    """The newest set of buckets in a folder, and the updates after it, to begin a job with, or to
    fill in what was lost of one."""

    def __init__(self, path: Path) -> None:
        """Raises Rejected where it has none."""
        base = newest_of_buckets(path)
        self._folder = CheckpointFolder(path, BUCKETS)
        updates = self._folder.updates(base[0].iteration)
        self._parts = [(part, read_about(path / part.file)) for part in (*base, *updates)]
        self.version = max(about.version for _, about in self._parts)
        """The newest that any part has."""

    def restore(self, slots: SlotRegion, tensors: Tensors) -> None:
        """Fill a fresh region: it is initialised at `version`, as one of a job that was paused; of
        a job whose updates are not synchronous, at its part's. `tensors`: the job's whole list.
        Raises Rejected, and leaves the region bare."""
        newest = self.fill(slots, tensors)
        version = self._version_of(newest)
        pushed = newest.applied or (version,) * slots.plan.workers
        for rank, iteration in enumerate(pushed):
            slots.set_pushed(rank, iteration)
        slots.set_applied(version, pushed)
        slots.initialize(version, newest.updates + version - newest.version)

    def stand_in(self, slots: SlotRegion, tensors: Tensors) -> None:
        """Fill a region that was lost, which stays bare: workers may have newer values. Raises
        Rejected."""
        newest = self.fill(slots, tensors)
        version = self._version_of(newest)
        if newest.applied:
            slots.set_applied(version, newest.applied)
        updates = newest.updates + version - newest.version
        slots.initialize(version, updates, spare=True)

    def _version_of(self, newest: About) -> int:
        """Return the version that a region filled with it has: its own, where ranks are counted."""
        return newest.version if newest.applied else self.version

    def fill(self, slots: SlotRegion, tensors: Tensors) -> About:
        """Fill a bare region's buffers, both of each kind, as it is not known yet which version
        will be there. Returns what the newest part says that is in it. Raises Rejected."""
        elements = slots.bucket.elements
        first = bucket_start(slots.bucket, tensors)
        filled, newest = 0, self._parts[0][1]
        for part, about in self._parts:
            begin = max(first, about.first)
            end = min(first + elements, about.first + about.elements)
            if begin >= end:
                continue
            _check(slots, tensors, about)
            if part.kind == BUCKETS:
                filled += end - begin
            self._fill(slots, part, about.first - first)
            newest = about
        if filled != elements:
            raise Rejected(
                f"{self._folder.path} has {filled} of the {elements} elements of bucket "
                f"{slots.bucket.index}"
            )
        return newest

    def _fill(self, slots: SlotRegion, part: Part, offset: int) -> None:
        """Copy what a part has of the bucket, whose first element is number -`offset` of the
        part's."""
        if why := self._folder.damage(part):
            raise Rejected(
                f"{self._folder.path}: {why}; remove iteration {part.iteration} there to begin "
                "with the one before"
            )
        for first, end, arrays in read_part(self._folder.path / part.file).pieces:
            low, high = max(0, first + offset), min(slots.bucket.elements, end + offset)
            if low >= high:
                continue
            theirs = slice(low - offset - first, high - offset - first)
            for parity in range(2):
                copy_into(slots.parameters(parity)[low:high], arrays[0][theirs])
                for index, state in enumerate(arrays[1:]):
                    copy_into(slots.state(parity, index)[low:high], state[theirs])


def _check(slots: SlotRegion, tensors: Tensors, about: About) -> None:
    """Raise Rejected where the checkpoint is not one of such a job."""
    plan, where = slots.plan, f"the checkpoint of job {about.job}"
    if RULES[plan.update.name].sums:
        raise Rejected(
            "aggregators keep nothing of a job that they add gradients up for: give it no "
            "checkpoint of theirs; its program has its own (slackwater.torch.checkpoint)"
        )
    if difference := _difference(about.tensors, tensors):
        raise Rejected(f"{where} {difference}")
    if plan.update.name != about.rule:
        raise Rejected(
            f"{where} has the states of {about.rule}, this job's rule is {plan.update.name}; "
            "give the job the rule that it was trained by"
        )
    if plan.consistency != about.consistency:
        raise Rejected(
            f"{where} was {about.consistency}, this job is {plan.consistency}; submit it alike"
        )
    if about.applied and len(about.applied) != plan.workers:
        raise Rejected(
            f"{where} had {len(about.applied)} workers, this one has {plan.workers}, and an "
            f"{plan.consistency} job's updates are counted by worker; submit it alike"
        )


def _difference(saved: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> str:
    """Say in which tensor they differ; empty: in none. Groups may."""
    if len(saved) != len(wanted):
        return f"has {len(saved)} tensors, this one has {len(wanted)}"
    for mine, other in zip(saved, wanted, strict=True):
        if (mine.name, mine.shape) != (other.name, other.shape):
            return (
                f"has tensor {mine.name} {list(mine.shape)} where this one has {other.name} "
                f"{list(other.shape)}"
            )
    return ""
