"""A bucket as the training program's thread sees it, and the check of what it pushes.

Two threads meet here: the program's, which fills slots and waits for versions, and the Agent's own,
which rings, is told of versions and changes the mapping when a bucket moves. `lock` covers the slot
against being swapped while a tensor is copied in; everything else is one word that one thread
writes and the other reads.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from slackwater.agent.attachment import ELEMENT, OWN, Array, Attached
from slackwater.agent.initial import Initial
from slackwater.agent.push_hyper import hyper_of
from slackwater.agent.region_access import InPlace, Staging
from slackwater.agent.snapshot import Snapshots
from slackwater.agent.state_copies import StateCopies
from slackwater.common.base.errors import GradientRefused, Rejected
from slackwater.common.domains.slots.frames import HeldStates, Offer, PushRefused
from slackwater.common.domains.slots.layout import bucket_plan, bucket_tensors
from slackwater.common.domains.slots.packed import packed_bytes
from slackwater.common.domains.slots.rows import ALL, Numbers, fits, write
from slackwater.common.domains.slots.rules import RULES, Floats, Hyper
from slackwater.common.transport.gpu import Device, DeviceArray, copy_into
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import BucketLayout, JobPlan, Located
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule


class WorkerBucket:
    """One bucket: its tensors' places in the slot, and how far it is."""

    def __init__(
        self,
        layout: BucketLayout,
        tensors: tuple[TensorSpec, ...],
        update: UpdateRule,
        copies: StateCopies | None = None,
        dtype: DType = "float32",
    ) -> None:
        self.layout = layout
        self.copies = copies or StateCopies(layout.index, layout.elements, 0, 0)
        """Parts of the optimiser's states, where its aggregator is reached over a network."""
        self.index = layout.index
        self.tensors = tensors
        self.bounds = list(pairwise(accumulate((prod(t.shape) for t in tensors), initial=0)))
        if self.bounds[-1][1] != layout.elements:
            raise Rejected(
                f"bucket {layout.index} has {layout.elements} elements, its tensors "
                f"{self.bounds[-1][1]}; controller and Agent are of different releases"
            )
        self._unpacked = _unpacked(layout, tensors, dtype)
        self.lock = threading.Lock()
        self.slots: Attached | None = None
        """Where the next gradient goes."""
        self.source: Attached | None = None
        """Where the parameters of `version` are."""
        self.staging: Staging | None = None
        self.gradients: list[Array] = []
        self.iteration = 0
        """The newest that was pushed whole."""
        self.version = -1
        """The newest whose parameters are here."""
        self.reads_later = False
        """Parameters are read when the program asks for them: a push is settled once it is applied.
        """
        self.acknowledged = -1
        """The newest version that is known to be complete; its parameters may not be here yet."""
        self.confirmed = 0
        """The newest that the program has waited for."""
        self.pushed_s = 0.0
        """When `iteration` was pushed whole, on the monotonic clock."""
        self.missing = set(range(len(tensors)))
        """Tensors of iteration + 1 that are not in the slot yet."""
        self.handed_out_views: dict[int, Array] = {}
        """Tensor -> the part of a slot that the program was given to write its gradient into."""
        self._rule, self._usual = update.name, Hyper.of(update)
        self.hyper = self._usual
        """The hyper-parameters of the iteration being produced, or outstanding."""
        self.refused: PushRefused | None = None
        self.was_refused = False
        """The region may hold a gradient that does not count."""
        self.lanes: tuple[int, ...] = (OWN,)
        """The slots that this process fills, one after another, in iteration + 1, or has filled in
        `iteration`: its rank's own, or those of the virtual ranks that it computes."""
        self._lane = 0
        """The place of the one that is filled next."""
        self.rows = ALL
        """The word of the push in the slot (slots/rows.py)."""
        self.reads_confirmed = False
        """Parameters are read as of `confirmed`, even where the next version is here."""

    @property
    def names(self) -> str:
        first, last = self.tensors[0].name, self.tensors[-1].name
        return first if first == last else f"{first} .. {last}"

    @property
    def sparse(self) -> bool:
        """Say whether it is of a table of which rows are pushed and read."""
        return self.tensors[0].sparse

    @property
    def reached(self) -> int:
        """The newest version that may be taken for waited for: one that this process has yet to
        push for may be here, where it was started again."""
        newest = self.acknowledged if self.reads_later else self.version
        return min(newest, self.iteration) if self.reads_confirmed else newest

    @property
    def settled(self) -> bool:
        newest = self.acknowledged if self.reads_later else self.version
        return newest >= self.iteration or self.refused is not None

    @property
    def begun(self) -> bool:
        """The slot holds something of an iteration that no version has answered."""
        part = self._lane > 0 or len(self.missing) < len(self.tensors)
        return part or self.iteration > self.version

    def begin(self, lanes: Sequence[int]) -> None:
        """Fill these slots in the next iteration, each with a gradient of every tensor. Nothing of
        that iteration may be there yet."""
        with self.lock:
            self.lanes = tuple(lanes)
            self._turn_to(0)

    def _turn_to(self, lane: int) -> None:
        """Let the next gradients go into another slot."""
        self._lane, slots = lane, self.slots
        if slots is None:
            return
        slots.lanes = self.lanes
        if not self.lanes:
            return
        flat = slots.slot(self.lanes[lane]) if self._unpacked is None else self._unpacked
        self.gradients = [
            flat[first:last].reshape(spec.shape)
            for (first, last), spec in zip(self.bounds, self.tensors, strict=True)
        ]

    def adopt(self, slots: Attached) -> None:
        """Use another mapping (the bucket moved, its region was lost): what the slot held goes
        along, unless it is there already, because the region is the same."""
        with self.lock:
            old = self.slots
            slots.lanes, slots.rows = self.lanes, self.rows
            # A copy that was made before this part of the next iteration came has it not.
            part = self._lane > 0 or len(self.missing) < len(self.tensors)
            elsewhere = old is not None and slots.gradient is not old.gradient
            if old and elsewhere and self.begun and (part or not slots.keeps(old, self.iteration)):
                for lane in self.lanes:
                    copy_into(slots.slot(lane), old.slot(lane))
            self.slots = slots
            self._turn_to(self._lane)

    def choose_hyper(self, job: str, given: Mapping[str, float]) -> None:
        """Choose those of the push that comes: what is given, or the usual ones, which others of
        the bucket's tensors may have been given in this iteration. Raises Rejected."""
        if given:
            self.hyper = hyper_of(job, self._rule, self._usual, given)
        elif len(self.missing) == len(self.tensors):
            self.hyper = self._usual

    def put(self, position: int, gradient: Array | None) -> None:
        """Copy a tensor's gradient into the slot (None: it was produced there)."""
        with self.lock:
            into = self.gradients[position]
            view = self.handed_out_views.get(position)
            if gradient is not None:
                copy_into(into, gradient)
            elif view is not None and view is not into:
                copy_into(into, view)  # Produced in a slot that has moved since.
            self._note_rows(ALL)
            self.missing.discard(position)
            if not self.missing:
                self._fill_slot()
                self.missing.update(range(len(self.tensors)))
                last = self._lane == len(self.lanes) - 1
                self.iteration += last
                if len(self.lanes) > 1:
                    self.handed_out_views.clear()
                    self._turn_to(0 if last else self._lane + 1)

    def _fill_slot(self) -> None:
        """Pack what was produced elsewhere than in the slot."""
        if self._unpacked is not None and self.slots is not None:
            from slackwater.common.domains.slots.elements import pack_blocks  # Loads numba.

            pack_blocks(self._unpacked, self.slots.slot(self.lanes[self._lane]))

    def bytes_of(self, position: int) -> int:
        """Return the bytes of a tensor's gradient as it travels."""
        gradient = self.gradients[position]
        return gradient.nbytes if self._unpacked is None else packed_bytes(gradient.size)

    def put_rows(self, numbers: Numbers, added: Floats) -> None:
        """Write rows of a sparse table into the slot, as the whole push: the gradient by which a
        step of 1 adds this. `numbers`: as the bucket counts them, ascending; `added`: [n, width].
        """
        width = self.tensors[0].shape[-1]
        with self.lock:
            assert self.slots is not None
            slot = self.slots.gradient
            if fits(len(numbers), width, slot):
                word, values = write(slot, numbers, width)
                np.negative(added, out=values)
            else:
                word, whole = ALL, slot.reshape(-1, width)
                if len(numbers) == len(whole):
                    np.negative(added, out=whole)
                else:
                    whole[:] = 0.0
                    whole[numbers] = -added
            self._note_rows(word)
            self.iteration += 1

    def _note_rows(self, word: int) -> None:
        self.rows = word
        if self.slots is not None:
            self.slots.rows = word

    def parameters(self, position: int) -> Floats:
        """Read-only: valid until this worker has pushed the tensor twice more."""
        view = self.buffer(position)
        if isinstance(view, np.ndarray):  # On a device nothing can be made read-only.
            view.flags.writeable = False
        return view

    def buffer(self, position: int) -> Floats:
        return self._values(position, self.confirmed if self.reads_confirmed else self.version)

    def _values(self, position: int, version: int) -> Floats:
        assert self.source is not None
        first, last = self.bounds[position]
        values = self.source.parameters(version)[first:last]
        return values.reshape(self.tensors[position].shape)

    @property
    def contained(self) -> tuple[int, ...]:
        """Return the newest iteration of each rank that `newest` contains; empty: the version says
        it."""
        if not isinstance(self.staging, Snapshots) or self.source is None:
            return ()
        self.buffer(0)
        return self.staging.applied[self.version & 1]

    def offer(self, handle: int, version: int, wanted: int) -> Offer:
        states: HeldStates = "whole" if self.kept_states() else "parts" if self.copies.parts else ""
        return Offer(
            handle=handle, version=version, applied=self.contained, states=states, wanted=wanted
        )

    def kept_states(self) -> tuple[int, list[Floats]] | None:
        """Return the optimiser's states in a mapped region that was lost, as of `version`, and how
        many updates they have had; None: there are none."""
        source = self.source
        if not isinstance(source, InPlace) or source is self.slots:
            return None
        kept = source.kept_states(None if isinstance(self.staging, Snapshots) else self.version)
        return kept if kept and kept[1] else None

    def updates(self, version: int) -> int:
        """How many are in what `newest` gives."""
        return sum(self.contained) if isinstance(self.staging, Snapshots) else version

    def newest(self, initial: Mapping[str, Array]) -> list[Floats]:
        """The newest parameters that this worker has: what it can seed a bare region with."""
        if self.source is not None and (not self.sparse or self.contained):
            every = range(len(self.tensors))
            return [self._values(position, self.version) for position in every]
        return [self._part(spec, initial.get(spec.name)) for spec in self.tensors]

    def first_states(self, initial: Initial, version: int) -> tuple[list[list[Floats]], int]:
        """Return what a region at `version` is seeded with beside `newest`: for each of the
        optimiser's states the tensors' parts of it, and how many updates they have had. Only as
        long as it has nothing newer the program has any."""
        if (version and self.source is not None) or not initial.states:
            return [], 0
        own = [initial.states.get(spec.name, ()) for spec in self.tensors]
        states = [
            [
                self._part(spec, mine[index] if index < len(mine) else None)
                for spec, mine in zip(self.tensors, own, strict=True)
            ]
            for index in range(max(map(len, own)))
        ]
        return states, initial.updates

    def _part(self, spec: TensorSpec, given: Array | None) -> Floats:
        """Return this bucket's part of a tensor's values; zeros where there are none."""
        if given is None:
            return np.broadcast_to(np.float32(0.0), spec.shape)
        if given.shape == spec.shape:
            return given
        first = self.layout.start
        return given.reshape(-1)[first : first + prod(spec.shape)]

    def take_refusal(self, rank: int) -> GradientRefused | None:
        """The refused tensor must be pushed again; the bucket's others still stand in the slot."""
        refused, self.refused = self.refused, None
        if refused is None:
            return None
        with self.lock:
            self.iteration = refused.iteration - 1
            self._turn_to(0)
            named = [i for i, spec in enumerate(self.tensors) if spec.name == refused.tensor]
            every = set(range(len(self.tensors)))  # All virtual ranks' are pushed again.
            self.missing = set(named) if named and self.lanes == (OWN,) else every
        return GradientRefused(refused.job, refused.tensor, rank, refused.iteration, refused.why)


def _unpacked(layout: BucketLayout, tensors: tuple[TensorSpec, ...], dtype: DType) -> Floats | None:
    """Return room for gradients, flat, until all of an iteration are there and are packed; None:
    slots take them as they are. Raises Rejected."""
    if dtype != "int8":
        return None
    if tensors[0].sparse:
        raise Rejected(
            f"tensor {tensors[0].name}: rows of a sparse table are not sent as int8; give "
            "gradient_dtype bfloat16"
        )
    return np.zeros(layout.elements, np.float32)


class Waiter:
    """The program's thread, asleep until all these buckets have settled."""

    def __init__(self, buckets: Iterable[WorkerBucket]) -> None:
        self._pending = list(buckets)
        self._lock = threading.Lock()
        self._woken = threading.Lock()
        self._woken.acquire()

    def look(self) -> None:
        """Both threads look: whoever sees the last bucket settled releases."""
        with self._lock:
            pending = self._pending
            while pending and pending[-1].settled:
                pending.pop()
            if not pending and self._woken.locked():
                self._woken.release()

    def release(self) -> None:
        with self._lock:
            self._pending.clear()
        self.look()

    def sleep(self, timeout_s: float) -> bool:
        return self._woken.acquire(timeout=timeout_s)


def check_gradient(gradient: Any, spec: TensorSpec, dtype: DType) -> str:
    """Say what is wrong with the gradient; empty: nothing. Values are checked where they are
    summed."""
    wanted = ELEMENT["float32" if dtype == "int8" else dtype]
    if not isinstance(gradient, np.ndarray | DeviceArray):
        on_device = hasattr(gradient, "__cuda_array_interface__")
        remedy = '; give the Agent device="cuda"' if on_device else ""
        return f"a {type(gradient).__name__}, not a numpy array{remedy}"
    if gradient.dtype != wanted:
        bits = " (bfloat16 as its bits)" if dtype == "bfloat16" else ""
        return f"dtype {gradient.dtype}, the job's gradients are {wanted}{bits}"
    if gradient.shape != spec.shape:
        return f"shape {gradient.shape}, the tensor has {spec.shape}"
    return ""


def unfit(plan: JobPlan, consistency: str | None, staleness: int | None, *, on_device: bool) -> str:
    """Say why a program that gives these, where it gives any, cannot train the job."""
    if plan.gradient_dtype == "int8" and on_device:
        return f"job {plan.job}: gradients on a device are not sent as int8; give bfloat16"
    if plan.consistency != "synchronous" and on_device:
        return (
            f"job {plan.job} is {plan.consistency}: its parameters are copied out in host "
            "memory; give no device, or make the job synchronous"
        )
    given = (
        consistency or plan.consistency,
        plan.staleness if staleness is None else staleness,
    )
    if given != (plan.consistency, plan.staleness):
        return (
            f"job {plan.job} is {plan.consistency} (staleness {plan.staleness}), its program "
            f"says {given[0]} (staleness {given[1]}); leave it out, or give it as submitted"
        )
    return ""


class TableKind(NamedTuple):
    """A table among tensors: how it is pushed, and by which rule it is updated."""

    sparse: bool = False
    update: UpdateRule | None = None


def read_tensors(
    tensors: Mapping[str, Any],
    groups: Mapping[str, int] = MappingProxyType({}),
    device: Device | None = None,
    tables: Mapping[str, TableKind] = MappingProxyType({}),
) -> tuple[tuple[TensorSpec, ...], Initial]:
    """The job's list and the initial values: of each tensor an array, or a shape (zeros)."""
    brought = tensors if isinstance(tensors, Initial) else Initial(tensors)
    specs: list[TensorSpec] = []
    values: dict[str, Array] = {}
    if not tensors:
        raise Rejected("an Agent without tensors; give at least one")
    for name, given in tensors.items():
        if device is not None and device.is_array(given):
            given = device.wrap(given).to_host()
        shape = given.shape if isinstance(given, np.ndarray) else tuple(given)
        if any(not isinstance(extent, int) or extent < 1 for extent in shape):
            raise Rejected(f"tensor {name}: shape {shape}; extents must be whole and at least 1")
        if isinstance(given, np.ndarray):
            if given.dtype != np.float32:
                raise Rejected(f"tensor {name}: parameters are float32, these are {given.dtype}")
            if not np.isfinite(given).all():
                raise Rejected(f"tensor {name}: its initial values are not all finite")
            values[name] = given
        brought.check_states(name, shape)
        table = tables.get(name, TableKind())
        group, sparse, update = groups.get(name, 0), table.sparse, table.update
        specs.append(TensorSpec(name=name, shape=shape, group=group, sparse=sparse, update=update))
    return tuple(specs), brought.with_values(values)


def worker_buckets(
    located: Located, spec: JobSpec, rank: int, tensors: tuple[TensorSpec, ...]
) -> list[WorkerBucket]:
    """Make the job's buckets from its first placement. Raises Rejected where this program does not
    fit the job."""
    plan = located.plan
    if plan.gradient_dtype != spec.gradient_dtype:
        raise Rejected(
            f"the job's gradients are {plan.gradient_dtype}, this program's "
            f"{spec.gradient_dtype}; give gradient_dtype as it was submitted"
        )
    if rank >= plan.workers:
        raise Rejected(f"rank {rank} of {plan.workers} workers")
    known = plan.workers if plan.virtual else 0
    if known != spec.virtual_ranks:
        raise Rejected(
            f"virtual_ranks: {spec.virtual_ranks}, the job has {known}; upgrade master and "
            "controller, or give the number with which the job began"
        )
    made = []
    for layout in located.buckets:
        own = bucket_tensors(layout, tensors)
        update = bucket_plan(plan, own).update
        every = plan.state_copies if RULES[update.name].states else 0
        copies = StateCopies(layout.index, layout.elements, rank, every)
        made.append(WorkerBucket(layout, own, update, copies, plan.gradient_dtype))
    return made
