"""A bucket's parameters and optimiser states as a file keeps them, and back into a region.

A checkpoint of a job's aggregators has a part for each bucket (common/base/checkpoint_folder.py):
an .npz of float32 arrays, as numpy.load reads it, without pickle:

    about           the JSON of an `About`, as bytes
    parameters      flat: the bucket's elements, in the order of the job's tensors
    state_0 ...     as many as the rule has, each as long (rules.py says which is which)

A job that begins with it may have other buckets: an element's place in the job's list of tensors
is what counts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np

from slackwater.common.base.checkpoint_folder import CheckpointFolder, Part, newest_of_buckets
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.layout import bucket_start
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import RULES, Floats
from slackwater.common.transport.gpu import copy_into
from slackwater.schemas.jobs import Consistency, TensorSpec
from slackwater.schemas.placement import Tensors


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a part says of itself, beside its arrays."""

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
    def nbytes(self) -> int:
        return copy_bytes(self.about.rule, self.about.elements)

    def write(self, path: Path, tensors: Tensors, first: int) -> None:
        """Write it as the part from element `first` on of the job's whole list of tensors. Raises
        OSError."""
        arrays: dict[str, Any] = {f"state_{i}": state for i, state in enumerate(self.states)}
        whole = msgspec.structs.replace(self.about, tensors=tensors, first=first)
        about = np.frombuffer(msgspec.json.encode(whole), np.uint8)
        with path.open("wb") as file:
            np.savez(file, about=about, parameters=self.parameters, **arrays)


def copy_bytes(rule: str, elements: int) -> int:
    """Return the size of a copy's arrays."""
    return 4 * elements * (1 + RULES[rule].states)


def read_copy(path: Path) -> BucketCopy:
    """Raises Rejected where the file has not what a part has."""
    about = read_about(path)
    names = ["parameters", *(f"state_{index}" for index in range(RULES[about.rule].states))]
    with _opened(path) as arrays:
        found = [arrays[name] for name in names]
    if any(each.dtype != np.float32 or each.shape != (about.elements,) for each in found):
        raise Rejected(f"{path} has not the {about.elements} float32 elements that it says")
    return BucketCopy(about, found[0], tuple(found[1:]))


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
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, msgspec.MsgspecError) as error:
        raise Rejected(f"{path} is not a part of a checkpoint: {error}") from error


class SavedJob:
    """The newest set of buckets in a folder, to begin a job with."""

    def __init__(self, path: Path) -> None:
        """Raises Rejected where there is none."""
        self._folder = CheckpointFolder(path)
        self._parts = newest_of_buckets(path)
        self._abouts = [read_about(path / part.file) for part in self._parts]

    def restore(self, slots: SlotRegion, tensors: Tensors) -> int:
        """Fill a fresh region: it is initialised at the checkpoint's version, as one of a job that
        was paused. Returns the version. `tensors`: the job's whole list. Raises Rejected, and
        leaves the region bare."""
        elements = slots.bucket.elements
        first = bucket_start(slots.bucket, tensors)
        filled, newest = 0, self._abouts[0]
        for part, about in zip(self._parts, self._abouts, strict=True):
            begin = max(first, about.first)
            end = min(first + elements, about.first + about.elements)
            if begin >= end:
                continue
            _check(slots, tensors, about)
            self._fill(slots, part, slice(begin - first, end - first), begin - about.first)
            filled, newest = filled + end - begin, about
        if filled != elements:
            raise Rejected(
                f"{self._folder.path} has {filled} of the {elements} elements of bucket "
                f"{slots.bucket.index}"
            )
        pushed = newest.applied or (newest.version,) * slots.plan.workers
        for rank, iteration in enumerate(pushed):
            slots.set_pushed(rank, iteration)
        slots.set_applied(newest.version, pushed)
        slots.initialize(newest.version, newest.updates)
        return newest.version

    def _fill(self, slots: SlotRegion, part: Part, into: slice, begin: int) -> None:
        """Copy what a part has from its element `begin` on."""
        if why := self._folder.damage(part):
            raise Rejected(
                f"{self._folder.path}: {why}; remove iteration {part.iteration} there to begin "
                "with the one before"
            )
        copy = read_copy(self._folder.path / part.file)
        theirs, version = slice(begin, begin + into.stop - into.start), copy.about.version
        copy_into(slots.parameters(version)[into], copy.parameters[theirs])
        for index, state in enumerate(copy.states):
            copy_into(slots.state(version, index)[into], state[theirs])


def _check(slots: SlotRegion, tensors: Tensors, about: About) -> None:
    """Raise Rejected where the checkpoint is not one of such a job."""
    plan, where = slots.plan, f"the checkpoint of job {about.job}"
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
