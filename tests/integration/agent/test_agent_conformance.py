"""Promises that every Agent keeps, whatever it works on: the services, the stand-in that other
tests of this folder command, and the cluster in one process that the binding's tests run on.

The promises are those of docs/guide/training.md. Two small tensors share a bucket, a large one has
its own.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest
from tests.in_process import InProcess
from tests.integration.agent.conftest import StandIn

from slackwater.agent import Agent
from slackwater.common.base.errors import DeadlineExceeded, GradientRefused, Rejected
from slackwater.common.domains.slots.packed import pack, unpack
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell import client
from slackwater.schemas.tensors import UpdateRule

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

SHAPES: dict[str, tuple[int, ...]] = {"w": (2, 3), "b": (3,), "large": (300_000,)}
MATES = ("w", "b")
RATE = 0.5
SGD = UpdateRule(name="sgd", learning_rate=RATE)
SOON_S = 0.5
"""A deadline that is meant to pass."""
_numbers = itertools.count(1)


class Cluster(Protocol):
    url: str | None

    def results(self, job: str) -> dict[int, str]:
        """Return the results of ranks that are done."""
        ...


class Local:
    """One process, no services."""

    url = None

    def __init__(self, cluster: InProcess) -> None:
        self._cluster = cluster

    def results(self, job: str) -> dict[int, str]:
        return {rank: text for (of, rank), text in self._cluster.finished.items() if of == job}


class StoodIn:
    def __init__(self, stand_in: Any) -> None:
        self._stand_in, self.url = stand_in, stand_in.url

    def results(self, job: str) -> dict[int, str]:
        return {finished.rank: finished.result for finished in self._stand_in.finished}


class Services:
    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self._loop = url, loop

    def results(self, job: str) -> dict[int, str]:
        async def ask() -> dict[int, str]:
            async with client.connect(self.url) as connected:
                record = await connected.job(job)
            return {int(rank): text for rank, text in record.results.items()}

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(20)


@contextmanager
def embedded() -> Iterator[Services]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    cluster = EmbeddedCluster(ClusterOptions(controllers=1, aggregators=2, cpu_share=1.0))
    try:
        asyncio.run_coroutine_threadsafe(cluster.__aenter__(), loop).result(60)
        try:
            yield Services(cluster.url, loop)
        finally:
            asyncio.run_coroutine_threadsafe(cluster.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """One for all tests: each has a job of its own."""
    with embedded() as made:
        yield made


def _cluster_of(kind: str, request: pytest.FixtureRequest) -> Cluster:
    if kind == "in process":
        local = InProcess()
        local.take_part(request.getfixturevalue("monkeypatch"))
        return Local(local)
    if kind == "services":
        return request.getfixturevalue("services")  # type: ignore[no-any-return]
    raise AssertionError(kind)


@pytest.fixture(params=["in process", "services", "stand-in shm", "stand-in tcp"])
def held(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param.startswith("stand-in"):
        server, folder = map(request.getfixturevalue, ("own_nats_server", "tmp_path"))
        with StandIn(server.url, folder, request.param.split()[-1]) as made:
            yield StoodIn(made)
    else:
        yield _cluster_of(request.param, request)


@pytest.fixture(params=["in process", "services"])
def whole(request: pytest.FixtureRequest) -> Cluster:
    """The stand-in knows one rule, one mode, and nothing of registration."""
    return _cluster_of(request.param, request)


def run(
    cluster: Cluster, program: Callable[[Agent], Any], *, workers: int = 1, **options: Any
) -> list[Any]:
    """One thread per rank; what each returns."""
    job = options.pop("job", f"conforming-{next(_numbers)}")

    def rank_main(rank: int) -> Any:
        own = {"tensors": initial(), "update": SGD, "deadline_s": 30.0, **options}
        with Agent(job=job, rank=rank, workers=workers, url=cluster.url, **own) as agent:
            return program(agent)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(rank_main, range(workers)))


def initial() -> dict[str, np.ndarray]:
    return {name: np.full(shape, 8.0, np.float32) for name, shape in SHAPES.items()}


def ones(name: str, factor: float = 1.0) -> np.ndarray:
    return np.full(SHAPES[name], factor, np.float32)


def push(agent: Agent, *names: str, factor: float = 1.0) -> None:
    for name in names or SHAPES:
        agent.push(name, ones(name, factor))


def value(agent: Agent, name: str) -> float:
    """All of its elements are alike, or this fails."""
    pulled = agent.pull(name)
    assert pulled.shape == SHAPES[name]
    assert pulled.min() == pulled.max()
    return float(pulled.min())


def test_small_neighbours_share_a_bucket(held: Cluster) -> None:
    def program(agent: Agent) -> list[list[str]]:
        return [[spec.name for spec in bucket.tensors] for bucket in agent._buckets]

    assert run(held, program) == [[["w", "b"], ["large"]]]


def test_tensors_are_pushed_in_any_order(held: Cluster) -> None:
    def program(agent: Agent) -> dict[str, float]:
        orders = list(itertools.permutations(SHAPES))
        for iteration, order in enumerate(orders):
            for name in orders[(iteration + agent.rank) % len(orders)]:
                assert agent.iteration == iteration
                push(agent, name)
            agent.wait(order)
        assert agent.iteration == len(orders)
        assert agent.versions() == (len(orders), len(orders))
        return {name: value(agent, name) for name in SHAPES}

    assert run(held, program, workers=2) == [dict.fromkeys(SHAPES, 8.0 - 6 * RATE)] * 2


def test_a_push_waits_until_its_slot_is_free(held: Cluster) -> None:
    """No wait is needed between iterations; only the last one's parameters are looked at."""

    def program(agent: Agent) -> float:
        for _ in range(5):
            push(agent)
        assert agent.iteration == 0, "only what was waited for counts"
        agent.wait()
        assert agent.iteration == 5
        return value(agent, "large")

    assert run(held, program, workers=2) == [8.0 - 5 * RATE] * 2


def test_what_is_not_pushed_yet_is_waited_for_as_of_the_iteration_before(held: Cluster) -> None:
    """Also where another tensor of its bucket is pushed already."""

    def program(agent: Agent) -> None:
        push(agent)
        push(agent, "w")
        assert agent.wait(["b"]) == 0, "the others were not waited for"
        assert value(agent, "b") == 8.0 - RATE
        assert agent.ready(["b"])
        for wait in (lambda: agent.wait(["w"]), lambda: agent.wait(), lambda: agent.pull("w")):
            with pytest.raises(Rejected, match=r"share a bucket, are pushed: b"):
                wait()
        assert agent.wait(["large"]) == 1, "that was the last of the first iteration"
        push(agent, "b", "large")
        assert agent.wait() == 2
        assert [value(agent, name) for name in SHAPES] == [8.0 - 2 * RATE] * 3

    run(held, program)


def test_an_update_needs_every_worker(held: Cluster) -> None:
    pushed, looked = threading.Barrier(2), threading.Barrier(2)

    def program(agent: Agent) -> float:
        if agent.rank == 0:
            push(agent)
            assert not agent.ready(SHAPES)
            agent._deadline_s = SOON_S
            with pytest.raises(DeadlineExceeded, match=rf"rank 0: version 1 .* {SOON_S:g} s"):
                agent.wait()
            agent._deadline_s = 30.0
        pushed.wait(30)
        if agent.rank == 1:
            push(agent, factor=3.0)
        looked.wait(30)
        agent.wait()  # Again.
        assert agent.ready(SHAPES)
        return value(agent, "w")

    assert run(held, program, workers=2) == [8.0 - 2 * RATE] * 2


def test_a_view_is_read_only_and_valid_until_the_tensor_is_pushed_twice_more(
    held: Cluster,
) -> None:
    def program(agent: Agent) -> None:
        push(agent)
        views = {name: agent.pull(name) for name in SHAPES}
        for view in views.values():
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0.0
        push(agent)
        agent.wait()
        for name, view in views.items():
            np.testing.assert_array_equal(view, ones(name, 8.0 - RATE))
        own = np.zeros(SHAPES["w"], np.float32)
        assert agent.pull("w", out=own) is own
        np.testing.assert_array_equal(own, ones("w", 8.0 - 2 * RATE))

    run(held, program)


def test_gradients_may_be_produced_in_their_slots(held: Cluster) -> None:
    def program(agent: Agent) -> float:
        for iteration in range(1, 5):
            for name in SHAPES:
                agent.gradient_buffer(name)[...] = iteration
                agent.push(name)
            agent.wait()
        return value(agent, "b")

    assert run(held, program) == [8.0 - RATE * (1 + 2 + 3 + 4)]


ROUNDS = 4


def drawn(elements: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng(rank)
    return [rng.standard_normal(elements).astype(np.float32) for _ in range(ROUNDS)]


def eight_bits(cluster: Cluster, elements: int, **options: Any) -> None:
    """Train with gradients of 8 bits, and compare with what their blocks can say."""

    def program(agent: Agent) -> np.ndarray:
        for gradient in drawn(elements, agent.rank):
            agent.gradient_buffer("w")[...] = gradient
            agent.push("w")
            agent.wait()
        found: np.ndarray = agent.pull("w").copy()
        return found

    tensors = {"w": np.zeros(elements, np.float32)}
    expected = tensors["w"]
    for one, other in zip(drawn(elements, 0), drawn(elements, 1), strict=True):
        mean = (unpack(pack(one)) + unpack(pack(other))) * np.float32(0.5)
        expected = expected - np.float32(RATE) * mean
    for got in run(cluster, program, workers=2, gradient_dtype="int8", tensors=tensors, **options):
        np.testing.assert_array_equal(got, expected)


def test_gradients_of_eight_bits_are_what_their_blocks_can_say(held: Cluster) -> None:
    eight_bits(held, 70)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_large_gradients_of_eight_bits_arrive_before_they_are_folded(
    services: Services, transport: str
) -> None:
    """Five million elements are more than a piece that would be folded ahead."""
    eight_bits(services, 5_000_001, transport=transport)


def test_each_push_of_eight_bits_counts_by_itself_where_the_job_is_asynchronous(
    whole: Cluster,
) -> None:
    def program(agent: Agent) -> float:
        for _ in range(3):
            agent.step({"w": np.full(40, 0.5 + agent.rank, np.float32)})
        return float(agent.pull("w")[7])

    tensors = {"w": np.zeros(40, np.float32)}
    found = run(
        whole, program, workers=2, gradient_dtype="int8", tensors=tensors,
        consistency="asynchronous",
    )  # fmt: skip
    assert min(found) == -RATE * 3 * (0.5 + 1.5), "whoever is last has all"


def test_a_gradient_that_is_not_finite_is_named_and_may_be_pushed_again(held: Cluster) -> None:
    """Nothing was applied of its bucket, and nothing is applied twice of the others."""

    def program(agent: Agent) -> dict[str, float]:
        push(agent)
        agent.wait()
        for name in SHAPES:
            bad = agent.rank == 1 and name == "b"
            push(agent, name, factor=np.nan if bad else 1.0)
        if agent.rank == 1:
            with pytest.raises(GradientRefused) as refused:
                agent.wait()
            error = refused.value
            assert (error.tensor, error.worker, error.iteration) == ("b", 1, 2)
            push(agent)  # All of the iteration: what was counted is not counted twice.
        agent.wait()
        assert agent.iteration == 2
        return {name: value(agent, name) for name in SHAPES}

    assert run(held, program, workers=2) == [dict.fromkeys(SHAPES, 8.0 - 2 * RATE)] * 2


def test_what_cannot_be_pushed_is_refused_before_anything_moves(held: Cluster) -> None:
    def program(agent: Agent) -> None:
        with pytest.raises(GradientRefused, match=r"shape \(3,\), the tensor has \(2, 3\)"):
            agent.push("w", ones("b"))
        with pytest.raises(GradientRefused, match="dtype float64"):
            agent.push("w", ones("w").astype(np.float64))
        with pytest.raises(Rejected, match="no tensor 'nobody'"):
            agent.push("nobody", ones("w"))
        with pytest.raises(Rejected, match="unknown hyper-parameter 'rate'"):
            agent.push("w", ones("w"), rate=1.0)
        with pytest.raises(Rejected, match="missing"):
            agent.step({"w": ones("w")})
        push(agent)
        agent.wait()
        assert value(agent, "w") == 8.0 - RATE

    run(held, program)


def test_a_close_gives_the_result_once(held: Cluster) -> None:
    def program(agent: Agent) -> None:
        push(agent)
        agent.close(result={"rank": agent.rank})
        agent.close(result="another")

    job = f"closing-{next(_numbers)}"
    run(held, program, workers=2, job=job)
    assert held.results(job) == {0: '{"rank": 0}', 1: '{"rank": 1}'}


def test_a_program_that_fails_is_not_done(held: Cluster) -> None:
    job = f"failing-{next(_numbers)}"

    def program(agent: Agent) -> None:
        push(agent)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(held, program, job=job)
    assert held.results(job) == {}


def test_a_program_that_is_started_again_goes_on_where_its_job_is(held: Cluster) -> None:
    job = f"again-{next(_numbers)}"

    def first(agent: Agent) -> None:
        for _ in range(3):
            push(agent)
        agent.wait()
        raise ZeroDivisionError

    def second(agent: Agent) -> float:
        assert agent.iteration == 3
        assert value(agent, "large") == 8.0 - 3 * RATE
        push(agent)
        agent.wait()
        return value(agent, "w")

    with pytest.raises(ZeroDivisionError):
        run(held, first, job=job)
    assert run(held, second, job=job) == [8.0 - 4 * RATE]


# Rules and modes ----------------------------------------------------------------------------------


def test_hyper_parameters_of_a_push_count_and_must_agree(whole: Cluster) -> None:
    def program(agent: Agent) -> float:
        gradients = {name: ones(name) for name in SHAPES}
        agent.step(gradients, learning_rate=0.25)
        agent.step(gradients)
        if agent.rank == 1:
            for name in MATES:
                agent.push(name, gradients[name], learning_rate=1.0)
            with pytest.raises(GradientRefused, match="learning_rate"):
                agent.wait(MATES)
        agent.step(gradients, learning_rate=RATE)  # The last rate given for a bucket counts.
        return value(agent, "b")

    assert run(whole, program, workers=2) == [8.0 - 0.25 - 2 * RATE] * 2


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_states_live_where_the_parameters_do(whole: Cluster, rule: Any) -> None:
    """Momentum .5 and a gradient of 1: steps of 1, 1.5, 1.75 rates. Adam's are of about one."""

    def program(agent: Agent) -> float:
        for _ in range(3):
            push(agent)
            agent.wait()
        return value(agent, "w")

    update = UpdateRule(name=rule, learning_rate=RATE, momentum=0.5)
    ends = {"momentum": 8.0 - RATE * (1 + 1.5 + 1.75), "adam": 8.0 - 3 * RATE}
    assert run(whole, program, update=update) == [pytest.approx(ends[rule], abs=1e-5)]


def test_an_asynchronous_push_waits_for_nobody(whole: Cluster) -> None:
    ahead = threading.Barrier(2)

    def program(agent: Agent) -> None:
        if agent.rank == 0:
            for iteration in range(1, 6):
                push(agent, "w", "large")
                assert value(agent, "b") == 8.0 - (iteration - 1) * RATE, "own pushes, each once"
                push(agent, "b")
                agent.wait()
                assert value(agent, "w") == 8.0 - iteration * RATE
        ahead.wait(60)
        if agent.rank == 1:
            push(agent)
            agent.wait()
            assert value(agent, "large") == 8.0 - 6 * RATE

    run(whole, program, workers=2, consistency="asynchronous")


@pytest.mark.parametrize("workers", [2, 4, 6])
def test_parameters_are_read_once_an_iteration_whoever_else_pushes(
    whole: Cluster, workers: int
) -> None:
    """Over tcp, where a read lasts for others' updates: at most 1.05 reads an iteration."""
    sizes, iterations = {"large": (300_000,)}, 10
    gradient = np.ones(300_000, np.float32)

    def program(agent: Agent) -> tuple[int, int]:
        before = agent.reads
        for _ in range(iterations):
            agent.step({"large": gradient})
            assert np.ptp(agent.pull("large")) == 0.0, "one whole version"
        reads, torn = (now - then for now, then in zip(agent.reads, before, strict=True))
        return reads, torn

    made = run(
        whole,
        program,
        workers=workers,
        consistency="asynchronous",
        tensors=sizes,
        transport="tcp",
    )
    assert sum(reads for reads, _ in made) <= 1.05 * workers * iterations
    assert sum(torn for _, torn in made) == 0


@pytest.mark.parametrize(("total", "moves"), [(True, 1 + 1.4 + 1.56), (False, 1 + 1.9 + 2.71)])
def test_a_total_momentum_is_shared_with_asynchrony(
    whole: Cluster, total: bool, moves: float
) -> None:
    """Two workers have .5 without being asked, which leaves .4 of .9."""

    def program(agent: Agent) -> None:
        if agent.rank == 0:
            for _ in range(3):
                push(agent)
                agent.wait()
            assert value(agent, "w") == pytest.approx(8.0 - moves * RATE, abs=1e-5)
            assert agent.updates == 3

    update = UpdateRule(name="momentum", learning_rate=RATE, momentum=0.9)
    run(
        whole,
        program,
        workers=2,
        consistency="asynchronous",
        update=update,
        total_momentum=total,
    )


def test_a_worker_is_ahead_by_at_most_the_staleness(whole: Cluster) -> None:
    ahead, followed = threading.Barrier(2), threading.Barrier(2)

    def program(agent: Agent) -> None:
        if agent.rank == 0:
            for _ in range(2):
                push(agent)
                agent.wait()
            push(agent)
            agent._deadline_s = SOON_S
            with pytest.raises(DeadlineExceeded):
                agent.wait()
            agent._deadline_s = 30.0
            ahead.wait(60)
            followed.wait(60)
            agent.wait()
            assert value(agent, "w") == 8.0 - 4 * RATE, "three of its own, one of the other's"
        else:
            ahead.wait(60)
            push(agent)
            agent.wait()
            followed.wait(60)

    run(whole, program, workers=2, consistency="stale-synchronous", staleness=2)


def test_another_tensor_list_is_refused(whole: Cluster) -> None:
    job = f"lists-{next(_numbers)}"

    def first(agent: Agent) -> None:
        with pytest.raises(Rejected):
            run(whole, lambda other: None, job=job, tensors={"w": (3, 2)})
        push(agent)
        agent.wait()

    run(whole, first, job=job)
