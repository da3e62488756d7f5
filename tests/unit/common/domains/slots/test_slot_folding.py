"""A fold changes nothing until it is committed, and names who spoils it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slackwater.common.domains.slots import folding
from slackwater.common.domains.slots.folding import blame, check_hypers, commit, fold, replay
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.region import Buffer, SlotRegion
from slackwater.common.domains.slots.rules import Hyper
from slackwater.common.transport.region import Region
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

TENSORS = (TensorSpec(name="weight", shape=(50, 4)), TensorSpec(name="bias", shape=(9,)))
UPDATE = UpdateRule(name="adam", learning_rate=0.01)


def region(
    workers: int = 2, update: UpdateRule = UPDATE, buffer: Buffer | None = None
) -> SlotRegion:
    plan = JobPlan(
        job=JobId("j1"),
        workers=workers,
        gradient_dtype="float32",
        update=update,
        layout_epoch=0,
        token="",
    )
    bucket = plan_buckets(TENSORS)[0]
    memory = buffer or bytearray(SlotRegion.nbytes_of(plan, bucket, TENSORS))
    made = SlotRegion.format(memory, plan, bucket, TENSORS, 0)
    made.initialize(0)
    for rank in range(workers):
        made.set_hyper(rank, Hyper.of(update))
    return made


def push(made: SlotRegion, rng: np.random.Generator) -> list[np.ndarray]:
    gradients = []
    for rank in range(made.geometry.workers):
        gradients.append(rng.standard_normal(made.geometry.elements).astype(np.float32))
        made.gradient(rank)[:] = gradients[-1]
    return gradients


@pytest.mark.parametrize("chunk", [1, 7, 100, 10**6])
def test_folds_add_up_to_the_replay_whatever_the_chunks(chunk: int) -> None:
    rng = np.random.default_rng(5)
    made = region()
    iterations = []
    for version in range(1, 6):
        iterations.append(push(made, rng))
        passed: list[int] = []
        assert fold(made, lambda passed=passed: passed.append(1), chunk)
        assert len(passed) == -(-made.geometry.elements // chunk) - 1
        assert made.version == version - 1, "a fold alone commits nothing"
        assert commit(made) == version
    initial = np.zeros(made.geometry.elements, np.float32)
    expected = replay(UPDATE, "float32", initial, iterations)
    assert (made.parameters(5).view(np.uint32) == expected.view(np.uint32)).all()
    assert made.folds == 5


def test_threads_that_share_a_fold_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is folded once, by whichever thread asks for it, and a NaN in any is found."""
    monkeypatch.setattr(folding, "SHARED_ELEMENTS_MIN", 1)
    rng = np.random.default_rng(6)
    made = region()
    pushed = push(made, rng)

    def share(work: Callable[[], bool]) -> bool:
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(work) for _ in range(3)]
            return all([future.result() for future in futures])

    chunks: list[int] = []
    assert fold(made, lambda: chunks.append(1), 7, share)
    assert len(chunks) == -(-made.geometry.elements // 7) - 1
    commit(made)
    expected = replay(UPDATE, "float32", np.zeros(made.geometry.elements, np.float32), [pushed])
    assert (made.parameters(1).view(np.uint32) == expected.view(np.uint32)).all()
    made.gradient(1)[-1] = np.nan
    assert not fold(made, None, 7, share)


def test_a_refused_fold_leaves_the_version_whole_and_can_be_repeated() -> None:
    rng = np.random.default_rng(6)
    made = region()
    push(made, rng)
    fold(made)
    commit(made)
    before = made.parameters(1).copy(), made.state(1, 0).copy(), made.state(1, 1).copy()
    good = push(made, rng)
    made.gradient(1)[205] = np.inf
    assert not fold(made)
    refusal = blame(made)
    assert (refusal.tensor, refusal.worker) == ("bias", 1)
    assert "inf" in refusal.why
    assert made.version == 1
    for kept, now in zip(
        before, (made.parameters(1), made.state(1, 0), made.state(1, 1)), strict=True
    ):
        assert (kept == now).all()
    made.gradient(1)[:] = good[1]
    assert fold(made)


def test_the_first_guilty_worker_is_named_and_nan_is_said() -> None:
    made = region(workers=3)
    push(made, np.random.default_rng(1))
    made.gradient(2)[3] = np.nan
    made.gradient(1)[100] = np.nan
    assert not fold(made)
    assert blame(made)[:2] == ("weight", 1)
    assert "nan" in blame(made).why


def test_an_overflow_without_a_guilty_value_names_the_largest_gradient() -> None:
    update = UpdateRule(name="sgd", learning_rate=1e38)
    made = region(update=update)
    made.gradient(0)[7] = 2.0
    made.gradient(1)[7] = 30.0
    assert not fold(made)
    refusal = blame(made)
    assert refusal.worker == 1
    assert "overflows" in refusal.why


def test_bias_correction_counts_from_when_the_state_was_fresh() -> None:
    """A region seeded at version 1000 after a loss takes the steps of a young optimiser."""
    young, old = region(), region()
    young.initialize(1000)
    young.set_pushed(0, 1000)
    for made in (young, old):
        push(made, np.random.default_rng(2))
        assert fold(made)
        commit(made)
    assert (young.parameters(1001) == old.parameters(1)).all()


def test_a_state_from_before_the_job_counts_its_updates() -> None:
    """Sixteen steps of nadam in one region end at the bits of nine and seven in two."""
    update = UpdateRule(name="nadam", learning_rate=0.01)
    whole, first, second = (region(update=update) for _ in range(3))

    def train(made: SlotRegion, begin: int, end: int) -> None:
        for t in range(begin, end):
            for rank in range(made.plan.workers):
                made.gradient(rank)[:] = np.sin(np.arange(made.geometry.elements) + 7 * t + rank)
            assert fold(made)
            commit(made)

    train(whole, 0, 16)
    train(first, 0, 9)
    second.parameters(0)[:] = first.parameters(9)
    for index in range(2):
        second.state(0, index)[:] = first.state(9, index)
    second.initialize(0, updates=9)
    assert second.state_since == -9
    train(second, 9, 16)
    assert (second.parameters(7) == whole.parameters(16)).all()
    assert (second.state(7, 1) == whole.state(16, 1)).all()


@pytest.mark.parametrize(
    ("rank", "hyper", "says"),
    [
        (1, Hyper(0.02), "learning_rate is 0.02, rank 0 pushed 0.01"),
        (0, Hyper(float("nan")), "learning_rate is nan"),
        (1, Hyper(0.01, beta2=1.0), "beta2 is 1.0"),
        (1, Hyper(0.01, weight_decay=float("inf")), "weight_decay is inf"),
    ],
)
def test_hyper_parameters_must_be_usable_and_agree(rank: int, hyper: Hyper, says: str) -> None:
    made = region()
    assert check_hypers(made) is None
    made.set_hyper(rank, hyper)
    refusal = check_hypers(made)
    assert refusal is not None
    assert refusal.worker == rank
    assert says in refusal.why


def test_hyper_parameters_that_the_rule_does_not_use_are_ignored() -> None:
    made = region(update=UpdateRule(name="sgd"))
    made.set_hyper(1, Hyper.of(UpdateRule(name="sgd"))._replace(momentum=float("nan")))
    assert check_hypers(made) is None


@pytest.mark.parametrize("unused", [{"momentum": float("nan")}, {"beta1": 1e300}, {"beta2": 1.0}])
def test_a_step_survives_hyper_parameters_that_its_rule_does_not_use(
    unused: dict[str, float],
) -> None:
    update = UpdateRule(name="sgd", learning_rate=0.5)
    made = region(update=update)
    pushed = push(made, np.random.default_rng(4))
    for rank in range(2):
        made.set_hyper(rank, Hyper.of(update)._replace(**unused))
    made.version = 4  # So that a power of what is unused would overflow.
    assert check_hypers(made) is None
    assert fold(made)
    mean = (pushed[0] + pushed[1]) * np.float32(0.5)
    assert (made.parameters(5) == -np.float32(0.5) * mean).all()


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_what_a_region_keeps_of_a_fold_follows_every_change(name: str) -> None:
    """Hyper-parameters of each push count, agreement is checked each time, and views that alternate
    stay those of the right buffers."""
    update = UpdateRule(name=name, learning_rate=0.01)  # type: ignore[arg-type]
    made = region(update=update)
    rates = [0.01, 0.01, 0.5, 0.5, 0.25, 0.01]
    iterations = []
    rng = np.random.default_rng(8)
    for version, rate in enumerate(rates, 1):
        made.set_hyper(0, Hyper.of(update)._replace(learning_rate=rate))
        refusal = check_hypers(made)
        agrees = rate == made.hyper(1).learning_rate
        assert (refusal is None) == agrees
        made.set_hyper(1, made.hyper(0))
        assert check_hypers(made) is None
        iterations.append(push(made, rng))
        assert fold(made)
        assert commit(made) == version
    expected = replay(
        update,
        "float32",
        np.zeros(made.geometry.elements, np.float32),
        iterations,
        lambda t: Hyper.of(update)._replace(learning_rate=rates[t - 1]),
    )
    assert (made.parameters(len(rates)).view(np.uint32) == expected.view(np.uint32)).all()


def test_a_fold_ends_in_memory_that_was_let_go_before_it_looked_at_it() -> None:
    """This happens when a job is dropped while the kernel's thread begins its first fold."""
    rng = np.random.default_rng(7)
    memory = Region.create(1 << 20, "r")
    made, kept = region(buffer=memory.buffer), region()
    for rank, gradient in enumerate(push(kept, rng)):
        made.gradient(rank)[:] = gradient
    memory.close()
    for each in (made, kept):
        assert fold(each)
        assert commit(each) == 1
    assert kept.parameters(1).any()
    assert (made.parameters(1) == kept.parameters(1)).all()
