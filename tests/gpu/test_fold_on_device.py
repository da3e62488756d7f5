"""A bucket's region with its slots on a device folds to the bits of one on the host."""

import numpy as np
import pytest

from slackwater.common.domains.slots.folding import blame, check_hypers, commit, fold, replay
from slackwater.common.domains.slots.gpu_kernels import DTYPES
from slackwater.common.domains.slots.gpu_region import DeviceSlotRegion, load_region, make_region
from slackwater.common.domains.slots.kernels import KERNEL_DTYPES
from slackwater.common.domains.slots.layout import HEADER_BYTES, plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import RULES, Hyper
from slackwater.common.transport.gpu import Device, DeviceRegion
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule

TENSORS = (TensorSpec(name="weight", shape=(50, 4)), TensorSpec(name="bias", shape=(9,)))
PAIRS: list[tuple[str, DType]] = [(rule, dtype) for rule in RULES for dtype in KERNEL_DTYPES]


def made(
    device: Device, update: UpdateRule, dtype: DType = "float32", workers: int = 2
) -> tuple[DeviceRegion, DeviceSlotRegion]:
    plan = JobPlan(
        job=JobId("j1"),
        workers=workers,
        gradient_dtype=dtype,
        update=update,
        layout_epoch=0,
        token="",
    )
    bucket = plan_buckets(TENSORS)[0]
    region, slots = make_region(device, plan, bucket, TENSORS, 0, "a1", pin=False)
    slots.initialize(0)
    for rank in range(workers):
        slots.set_hyper(rank, Hyper.of(update))
    return region, slots


def gradients(rng: np.random.Generator, slots: SlotRegion) -> list[np.ndarray]:
    drawn = [
        rng.standard_normal(slots.geometry.elements).astype(np.float32)
        for _ in range(slots.geometry.workers)
    ]
    if slots.geometry.dtype == "bfloat16":
        return [(values.view(np.uint32) >> 16).astype(np.uint16) for values in drawn]
    return [values.astype(slots.geometry.dtype) for values in drawn]


def test_the_kernels_names_of_dtypes_are_one() -> None:
    assert {np.dtype(stored): name for name, stored in KERNEL_DTYPES.items()} == DTYPES


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(("rule", "dtype"), PAIRS)
def test_folds_add_up_to_the_replay_on_this_cpu(
    device: Device, rule: str, dtype: DType, workers: int
) -> None:
    """Six iterations, bit for bit."""
    rng = np.random.default_rng(5)
    update = UpdateRule(name=rule, learning_rate=0.01, weight_decay=0.001)  # type: ignore[arg-type]
    region, slots = made(device, update, dtype, workers)
    iterations = []
    for version in range(1, 7):
        iterations.append(gradients(rng, slots))
        for rank, gradient in enumerate(iterations[-1]):
            slots.gradient(rank).assign(gradient)
        assert check_hypers(slots) is None
        assert fold(slots)
        assert commit(slots) == version
    expected = replay(update, dtype, np.zeros(slots.geometry.elements, np.float32), iterations)
    got = slots.parameters(6).to_host()
    assert (got.view(np.uint32) == expected.view(np.uint32)).all()
    region.close()


def test_a_fold_in_chunks_is_the_same(device: Device) -> None:
    update = UpdateRule(name="adam", learning_rate=0.01)
    results = []
    for chunk in (None, 1, 7, 100):
        region, slots = made(device, update)
        for rank, gradient in enumerate(gradients(np.random.default_rng(3), slots)):
            slots.gradient(rank).assign(gradient)
        assert fold(slots, chunk_elements=chunk)
        results.append(slots.parameters(1).to_host())
        region.close()
    assert all((result == results[0]).all() for result in results)


def test_what_is_not_finite_is_refused_and_the_guilty_named(device: Device) -> None:
    region, slots = made(device, UpdateRule(name="adam"))
    good = gradients(np.random.default_rng(6), slots)
    bad = good[1].copy()
    bad[205] = np.inf
    slots.gradient(0).assign(good[0])
    slots.gradient(1).assign(bad)
    assert not fold(slots)
    refusal = blame(slots)
    assert (refusal.tensor, refusal.worker) == ("bias", 1)
    assert "inf" in refusal.why
    slots.gradient(1).assign(good[1])
    assert fold(slots)
    region.close()


def test_an_overflow_names_the_largest_gradient(device: Device) -> None:
    region, slots = made(device, UpdateRule(name="sgd", learning_rate=1e38))
    for rank, value in enumerate((2.0, 30.0)):
        gradient = np.zeros(slots.geometry.elements, np.float32)
        gradient[7] = value
        slots.gradient(rank).assign(gradient)
    assert not fold(slots)
    assert blame(slots).worker == 1
    assert "overflows" in blame(slots).why
    region.close()


def test_to_the_host_and_back_nothing_is_lost(device: Device) -> None:
    """A handover, a stop in order: header, slots, both versions, states, record."""
    region, slots = made(device, UpdateRule(name="momentum"))
    for rank, gradient in enumerate(gradients(np.random.default_rng(9), slots)):
        slots.gradient(rank).assign(gradient)
        slots.set_pushed(rank, 1)
    assert fold(slots)
    commit(slots)
    host = region.whole()
    plain = SlotRegion.open(host.buffer)
    assert (plain.version, plain.all_pushed(), plain.identity) == (1, [1, 1], slots.identity)
    assert (plain.parameters(1) == slots.parameters(1).to_host()).all()
    assert (plain.state(1, 0) == slots.state(1, 0).to_host()).all()
    again, there = load_region(device, host, pin=False)
    assert bytes(again.whole().buffer) == bytes(host.buffer)
    assert there.tensors == slots.tensors
    assert np.frombuffer(again.buffer, np.uint8)[HEADER_BYTES : HEADER_BYTES + 4096].sum() == 0, (
        "the memfd holds no body: its pages are not taken"
    )
    plain.release()
    for each in (region, again, host):
        each.close()
