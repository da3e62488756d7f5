"""One update of a bucket: check what was pushed, fold it into the other buffers, name the guilty.

Nothing here flips the version: the caller does, with `commit`, after `fold` said that every value
is finite. So a refused or interrupted fold leaves the region as it was.

`replay` is the same update on plain arrays in one process: what every distributed run is compared
with, bit for bit.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.domains.slots.gradient_squares import (
    FLOOR_MIN,
    FLOOR_PART,
    BucketSquares,
    FoldSquares,
)
from slackwater.common.domains.slots.kernels import SLOT_DTYPES, Fold, fold_chunk
from slackwater.common.domains.slots.layout import PAGE, PARAMETER_BYTES, ROWS, tensor_at
from slackwater.common.domains.slots.packed import slot_length
from slackwater.common.domains.slots.region import FoldSpan, SlotRegion
from slackwater.common.domains.slots.row_kernels import ROW_KERNELS, copy_rows, fold_rows
from slackwater.common.domains.slots.rows import (
    ALL,
    NO_ROWS,
    Lacking,
    Numbers,
    fault,
    read,
    width_of,
)
from slackwater.common.domains.slots.rules import RULES, Floats, Hyper, divisor, scalars, widen
from slackwater.schemas.tensors import DType, UpdateRule

CHUNK_ELEMENTS: Final = limits.CHUNK_BYTES // PARAMETER_BYTES
SHARED_CHUNK_ELEMENTS: Final = CHUNK_ELEMENTS // 4
SHARED_CHUNK_ELEMENTS_MIN: Final = CHUNK_ELEMENTS // 32
SHARED_ELEMENTS_MIN: Final = CHUNK_ELEMENTS // 2
"""A shorter fold is done before another thread is awake."""
Share = Callable[[Callable[[], bool]], bool]
"""Does work in several threads at once, the calling one included; whether all gave True."""


class Refusal(NamedTuple):
    """A push that cannot be applied."""

    tensor: str
    worker: int
    why: str


def _ranks(region: SlotRegion, alone: int | None) -> Sequence[int]:
    """Return the ranks whose pushes are the update."""
    return range(region.active) if alone is None else (alone,)


def check_hypers(region: SlotRegion, alone: int | None = None) -> Refusal | None:
    """Say whether all ranks pushed the same usable hyper-parameters; else the first that did
    not."""
    ranks = _ranks(region, alone)
    pushed = region.hyper_blocks(ranks)
    if region.accepted == pushed:  # The same bytes as last time.
        return None
    rule = RULES[region.plan.update.name]
    reference = region.hyper(ranks[0])
    for rank in ranks:
        hyper = region.hyper(rank)
        why = rule.fault(hyper) or rule.difference(hyper, reference)
        if why:
            return Refusal(tensor_at(region.tensors, 0), rank, why)
    region.accepted = pushed
    return None


def fold(
    region: SlotRegion,
    between: Callable[[], None] | None = None,
    chunk_elements: int | None = None,
    share: Share | None = None,
    alone: int | None = None,
    done: int = 0,
    squares: FoldSquares | None = None,
) -> bool:
    """Compute the next version into the buffers that the version word does not select, by the
    kernels of the memory they are in. `between` is called between chunks; `share` does a large
    fold in several threads; `alone`: the update is this rank's push by itself; the first `done`
    elements are folded already, and `squares` has theirs. False: some value is not finite, nothing
    may be committed."""
    if (rows := _pushed_rows(region, alone)) is not None:
        return _fold_rows(region, alone, rows, between)
    region.lacking = None
    squares = squares if done and squares is not None else squares_of(region, alone)
    clean = _fold(region, between, chunk_elements, share, alone, done, squares)
    region.measured = None if squares is None else _measured(region, squares)
    return clean


def _fold(
    region: SlotRegion,
    between: Callable[[], None] | None,
    chunk_elements: int | None,
    share: Share | None,
    alone: int | None,
    done: int,
    squares: FoldSquares | None,
) -> bool:
    elements = region.geometry.elements - done
    fold_elements, k = _prepared(region, alone), _scalars(region, alone)
    if region.kernels is not None or elements < SHARED_ELEMENTS_MIN:
        share = None
    chunk = chunk_elements or chunk_of(region)
    if share is None and elements <= chunk:
        return elements == 0 or fold_elements(done, done + elements, k, squares)
    spans = _spans(elements, chunk) if share is None or chunk_elements else _shared(elements)
    taken = iter(spans)

    def work() -> bool:
        clean = True
        for lo, hi in taken:  # Each is taken once, whichever thread asks.
            if lo and between is not None:
                between()
            clean &= fold_elements(done + lo, done + hi, k, squares)
        return clean

    return work() if share is None else share(work)


class _Rows(NamedTuple):
    """A push of some rows."""

    rank: int
    fault: str
    """Why it cannot be folded; empty: it can."""
    width: int = 0
    numbers: Numbers = NO_ROWS
    values: NDArray[np.generic] = np.empty(0, np.float32)


def _pushed_rows(region: SlotRegion, alone: int | None) -> _Rows | None:
    """Return the rows that are the update; None: it is of all elements."""
    if alone is None and (region.active > 1 or region.plan.virtual):
        return None
    rank = alone or 0
    word = region.rank_block(rank)[ROWS]
    if word == ALL:
        return None
    name, width = region.plan.update.name, width_of(region.tensors)
    if not width or name not in ROW_KERNELS:
        return _Rows(rank, f"a push of some rows, for which a sparse table by {name} has no use")
    if region.geometry.dtype == "int8":
        return _Rows(rank, "a push of some rows, which are not sent as int8")
    if region.kernels is not None:
        return _Rows(rank, "a push of some rows, which an aggregator with a device does not fold")
    try:
        numbers, values = read(region.gradient(rank), word, width)
    except ValueError as error:
        return _Rows(rank, str(error))
    wrong = fault(numbers, region.geometry.elements // width)
    return _Rows(rank, wrong, width, numbers, values)


def _fold_rows(
    region: SlotRegion, alone: int | None, pushed: _Rows, between: Callable[[], None] | None
) -> bool:
    """Fold what a rank pushed of a table, once the buffers of the next version have all else. Bits
    are those of the rule, for these rows."""
    if pushed.fault:
        return False
    version, k, geometry = region.version, _scalars(region, alone), region.geometry
    buffers = [
        (region.parameters(version), region.parameters(version + 1)),
        *(
            (region.state(version, index), region.state(version + 1, index))
            for index in range(geometry.states)
        ),
    ]
    lacking, region.lacking = region.lacking, None
    known = lacking is not None and lacking[:2] == (version, region.location_epoch)
    for old, new in buffers:
        if known and lacking is not None:
            copy_rows(lacking.rows, pushed.width, old, new)
        else:
            np.copyto(new, old)
    if between is not None:
        between()
    rule, values = region.plan.update.name, pushed.values.view(SLOT_DTYPES[geometry.dtype])
    clean = fold_rows(rule, pushed.numbers, pushed.width, values, buffers, k)
    region.lacking = Lacking(version + 1, region.location_epoch, pushed.numbers)
    return clean


def _whole(region: SlotRegion, pushed: _Rows) -> dict[int, NDArray[np.generic]]:
    """Return rows that were pushed as a gradient of all elements, by its rank."""
    whole = np.zeros_like(region.gradient(pushed.rank))
    rows = whole.reshape(-1, pushed.width)
    rows[pushed.numbers] = pushed.values.reshape(-1, pushed.width)
    return {pushed.rank: whole}


def fold_span(
    region: SlotRegion, lo: int, hi: int, squares: FoldSquares | None = None
) -> tuple[bool, Floats]:
    """Elements [lo, hi) of the next version alone, in host memory: (whether all is finite, the
    scalars of the step)."""
    k = _scalars(region, None)
    return _prepared(region, None)(lo, hi, k, squares), k


def squares_of(region: SlotRegion, alone: int | None = None) -> FoldSquares | None:
    """Return what the fold of the next version adds squares to; None: nobody wants them, or there
    is one gradient, or a device folds."""
    wanted = region.plan.noise and alone is None and region.active > 1
    if not wanted or region.kernels is not None:
        return None
    second = RULES[region.plan.update.name].second
    if second is None:
        return FoldSquares(1.0)
    version = region.version
    known = region.squares.at(version)
    total = known.second if known is not None else 0.0
    if total == 0.0:  # The first version that is measured.
        total = float(region.state(version, second).sum(dtype=np.float64))
    return FoldSquares(FLOOR_PART * total / region.geometry.elements)


def _measured(region: SlotRegion, squares: FoldSquares) -> BucketSquares:
    name, workers = region.plan.update.name, region.active
    scale = 1.0 if squares.floor >= FLOOR_MIN else 0.0
    if RULES[name].ages:  # The second moment is smaller than it should be while it is young.
        updates = region.version - region.state_since
        scale *= 1.0 - region.hyper(0).beta2 ** max(updates, 0)
    summed = workers / divisor(name, workers)
    return squares.totals(workers, scale, 1.0 / summed**2)


def step_of(region: SlotRegion) -> Floats:
    """The scalars of the next version's step: the same object while nothing of it changes."""
    return _scalars(region, None)


def _spans(elements: int, chunk: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + chunk, elements)) for lo in range(0, elements, chunk)]


@functools.lru_cache(1024)
def _shared(elements: int) -> tuple[tuple[int, int], ...]:
    """Chunks for several threads: smaller towards the end, so that all end at about the same time
    (guided self-scheduling: Polychronopoulos and Kuck 1987)."""
    spans, lo = [], 0
    while lo < elements:
        fair = (elements - lo) // 4 // PAGE * PAGE
        chunk = min(max(fair, SHARED_CHUNK_ELEMENTS_MIN), SHARED_CHUNK_ELEMENTS)
        spans.append((lo, min(lo + chunk, elements)))
        lo += chunk
    return tuple(spans)


def _prepared(region: SlotRegion, alone: int | None) -> FoldSpan:
    """The fold of the region's next version, (lo, hi, scalars) -> whether all is finite. Small
    buckets are folded in less time than the views of their parts take to make: a region keeps
    them, a pair for the two ways that its buffers alternate."""
    version, rule = region.version, region.plan.update.name
    geometry, ranks = region.geometry, _ranks(region, alone)
    key = (version & 1, alone, len(ranks))
    known = region.prepared.get(key)
    if known is not None:
        return known
    dtype = SLOT_DTYPES[geometry.dtype]
    stride = geometry.slot_stride // np.dtype(dtype).itemsize
    slots = region.slots(dtype)[ranks[0] * stride :]
    parameters = (region.parameters(version), region.parameters(version + 1))
    states = [
        (region.state(version, index), region.state(version + 1, index))
        for index in range(geometry.states)
    ]
    if region.kernels is None:
        made: FoldSpan = Fold(rule, slots, stride, len(ranks), parameters, states)
    else:
        on_device: Callable[..., bool] = region.kernels.fold_chunk

        def made(lo: int, hi: int, k: Floats, squares: FoldSquares | None = None) -> bool:
            return on_device(rule, slots, stride, len(ranks), (lo, hi), parameters, states, k)

    region.prepared[key] = made
    return made


def _scalars(region: SlotRegion, alone: int | None) -> Floats:
    """Return the scalars of the next version's step; computed anew where something in them
    changed."""
    ranks = _ranks(region, alone)
    first, rule = region.hyper_blocks(ranks[:1]), region.plan.update.name
    ages = RULES[rule].ages
    t = region.version + 1 - region.state_since if ages else 1
    of = (first, t, len(ranks))
    if region.step is None or region.step[:3] != of:
        parts = divisor(rule, len(ranks))
        region.step = (*of, scalars(region.hyper(ranks[0]), t, parts))
    return region.step[3]


def chunk_of(region: SlotRegion) -> int:
    """The grain of execution where the region is, in elements."""
    return CHUNK_ELEMENTS if region.kernels is None else region.kernels.chunk_elements


def commit(region: SlotRegion, alone: int | None = None) -> int:
    """The new version: the one store that makes the fold's result the bucket's, and what it says of
    the rank whose push it was."""
    region.folds += 1
    if region.measured is not None:
        region.squares.write(region.version + 1, region.measured)
        region.measured = None
    if alone is not None:
        applied = region.applied()
        applied[alone] += 1
        region.set_applied(region.version + 1, applied)
    region.version = version = region.version + 1
    return version


def blame(region: SlotRegion, alone: int | None = None) -> Refusal:
    """After an unclean fold, a second look: whose gradient, in which tensor.

    The first worker with a value that is not finite; when all are finite, the sum or the
    update overflowed, and the worker with the largest gradient there is named.
    """
    rows = _pushed_rows(region, alone)
    if rows is not None and rows.fault:
        return Refusal(tensor_at(region.tensors, 0), rows.rank, rows.fault)
    gradients = (
        {rank: _elements(region, rank) for rank in _ranks(region, alone)}
        if rows is None
        else _whole(region, rows)
    )
    for lo in range(0, region.geometry.elements, CHUNK_ELEMENTS):
        hi = min(lo + CHUNK_ELEMENTS, region.geometry.elements)
        for rank, gradient in gradients.items():
            finite = np.isfinite(widen(region.to_host(gradient[lo:hi])))
            if not finite.all():
                element = lo + int(np.argmin(finite))
                value = _value(region, gradient, element)
                return Refusal(
                    tensor_at(region.tensors, element), rank, f"its gradient contains {value}"
                )
    return _blame_overflow(region, gradients)


def _blame_overflow(region: SlotRegion, gradients: dict[int, NDArray[np.generic]]) -> Refusal:
    new = region.version + 1
    buffers = [region.parameters(new)]
    buffers += [region.state(new, index) for index in range(region.geometry.states)]
    for buffer in buffers:
        for lo in range(0, len(buffer), CHUNK_ELEMENTS):
            finite = np.isfinite(region.to_host(buffer[lo : lo + CHUNK_ELEMENTS]))
            if not finite.all():
                element = lo + int(np.argmin(finite))
                values = {
                    rank: abs(_value(region, gradient, element))
                    for rank, gradient in gradients.items()
                }
                worst = max(values, key=values.__getitem__)
                old = _value(region, region.parameters(region.version), element)
                why = f"the update overflows: gradient {values[worst]:g}, parameter {old:g}"
                return Refusal(tensor_at(region.tensors, element), worst, why)
    why = "the update was not finite, and a second one was"
    return Refusal(tensor_at(region.tensors, 0), next(iter(gradients)), why)


def _elements(region: SlotRegion, rank: int) -> NDArray[np.generic]:
    """Return a rank's slot with a number for each element."""
    gradient = region.gradient(rank)
    return widen(gradient) if region.geometry.dtype == "int8" else gradient


def _value(region: SlotRegion, array: NDArray[np.generic], element: int) -> float:
    return float(widen(region.to_host(array[element : element + 1]))[0])


def replay(
    update: UpdateRule,
    dtype: DType,
    initial: Floats,
    iterations: Iterable[Sequence[NDArray[np.generic]]],
    hypers: Callable[[int], Hyper] | None = None,
) -> Floats:
    """The parameters after all `iterations` (each the workers' gradients in rank order, float32,
    float16, bfloat16 as uint16, or int8 as it is packed), computed in this process alone by the
    same kernels. `hypers` gives the hyper-parameters of an iteration (from 1); without it they are
    the rule's.

    Raises ValueError at a value that is not finite: a run would have refused it.
    """
    name = update.name
    size = len(initial)
    parameters = [np.array(initial, np.float32), np.empty(size, np.float32)]
    states = [
        [np.zeros(size, np.float32), np.empty(size, np.float32)] for _ in range(RULES[name].states)
    ]
    stride = slot_length(size, dtype)
    slots: NDArray[np.generic] = np.empty(0, SLOT_DTYPES[dtype])
    for iteration, gradients in enumerate(iterations, 1):
        workers = len(gradients)
        if len(slots) != workers * stride:
            slots = np.empty(workers * stride, SLOT_DTYPES[dtype])
        for rank, gradient in enumerate(gradients):
            slots[rank * stride : (rank + 1) * stride] = gradient.reshape(-1).view(slots.dtype)
        hyper = hypers(iteration) if hypers is not None else Hyper.of(update)
        k = scalars(hyper, iteration, divisor(name, workers))
        for lo in range(0, size, CHUNK_ELEMENTS):
            span = (lo, min(lo + CHUNK_ELEMENTS, size))
            pairs = [(pair[0], pair[1]) for pair in states]
            both = (parameters[0], parameters[1])
            if not fold_chunk(name, slots, stride, workers, span, both, pairs, k):
                raise ValueError(f"iteration {iteration}: a gradient or result is not finite")
        for pair in (parameters, *states):
            pair.reverse()
    return parameters[0]
