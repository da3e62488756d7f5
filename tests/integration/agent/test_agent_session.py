"""An Agent against a small cluster that can be told to move, refuse, break and forget: whatever
happens, its parameters are those of plain arithmetic, and no iteration is counted twice."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slackwater.agent import Agent
from slackwater.common.base.errors import DeadlineExceeded, GradientRefused, Rejected, Unavailable
from slackwater.schemas.tensors import UpdateRule

pytestmark = pytest.mark.live

SHAPES = {"w": (5, 7), "b": (7,), "big": (40,), "scale": ()}
"""With 64-byte buckets: w and big have one of their own, b and scale are neighbours of nobody."""
SGD = UpdateRule(name="sgd", learning_rate=0.5)
Train = Callable[..., list[Any]]


def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(rank: int, iteration: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, iteration])
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def expected(iterations: int, workers: int = 2, rate: float = 0.5) -> dict[str, np.ndarray]:
    """Plain arithmetic: in float32, the sum in rank order."""
    parameters = initial()
    for iteration in range(1, iterations + 1):
        each = [gradients(rank, iteration) for rank in range(workers)]
        for name in parameters:
            total = each[0][name]
            for other in each[1:]:
                total = total + other[name]
            step = np.float32(rate) * (total * np.float32(1.0 / workers))
            parameters[name] = np.asarray(parameters[name] - step, np.float32)
    return parameters


def check(got: dict[str, np.ndarray], iterations: int, **how: Any) -> None:
    for name, wanted in expected(iterations, **how).items():
        np.testing.assert_array_equal(got[name], wanted, err_msg=name)


def copies(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in parameters.items()}


def test_steps_train_all_workers_to_the_same_parameters(cluster: Any, train: Train) -> None:
    def program(agent: Agent) -> dict[str, np.ndarray]:
        for iteration in range(1, 11):
            parameters = agent.step(gradients(agent.rank, iteration))
        assert agent.iteration == 10
        assert agent.versions() == (10, 10)
        return copies(parameters)

    for parameters in train(cluster, program, tensors=initial(), update=SGD):
        check(parameters, 10)
    assert sorted(cluster.applied) == sorted(set(cluster.applied))
    assert [finished.rank for finished in cluster.finished] in ([0, 1], [1, 0])
    elements = sum(slots.geometry.elements for _, slots in cluster.regions)
    pushed, pulled = zip(*(slots.bytes_moved() for _, slots in cluster.regions), strict=True)
    assert sum(pushed) == sum(pulled) == 10 * 2 * 4 * elements
    durations = {0: 0, 1: 0}
    for observed in cluster.observed:
        assert observed.first_iteration == durations[observed.rank] + 1
        durations[observed.rank] += len(observed.durations_s)
        if observed.durations_s:
            assert (observed.workers, observed.buckets) == (2, len(cluster.buckets))
    assert durations == {0: 10, 1: 10}


def test_tensors_pushed_as_they_come_pulled_as_they_are_needed(cluster: Any, train: Train) -> None:
    """The order of a real training program: backward pushes in reverse, forward pulls in order;
    gradients are produced in the slot, parameters copied to the program's own arrays."""

    def program(agent: Agent) -> dict[str, np.ndarray]:
        own = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
        for iteration in range(1, 6):
            for name in SHAPES:
                assert agent.pull(name, out=own[name]) is own[name]
            made = gradients(agent.rank, iteration)
            for name in reversed(SHAPES):
                agent.gradient_buffer(name)[...] = made[name]
                agent.push(name)
        agent.wait()
        return copies(agent.parameters())

    for parameters in train(cluster, program, tensors=initial(), update=SGD):
        check(parameters, 5)


def test_a_pull_over_shared_memory_copies_nothing_and_cannot_be_written(
    cluster: Any, train: Train
) -> None:
    def program(agent: Agent) -> bool:
        agent.step(gradients(agent.rank, 1))
        view = agent.pull("w")
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1.0
        return bool(np.shares_memory(view, agent.pull("w")))

    assert train(cluster, program, tensors=initial(), update=SGD) == [True, True]


def test_a_redirect_goes_unnoticed(cluster: Any, train: Train) -> None:
    """All buckets move to the other aggregator, and back, while iterations run."""
    moved = threading.Barrier(2)

    def program(agent: Agent) -> dict[str, np.ndarray]:
        for iteration in range(1, 31):
            if iteration in (8, 20):
                if moved.wait() == 0:
                    cluster.do(cluster.move_after_next("a2" if iteration == 8 else "a1"))
                moved.wait()
            parameters = agent.step(gradients(agent.rank, iteration))
        return copies(parameters)

    for parameters in train(cluster, program, tensors=initial(), update=SGD):
        check(parameters, 30)
    assert {place.location_epoch for place in cluster.places} == {2}
    assert sorted(cluster.applied) == sorted(set(cluster.applied))


@pytest.mark.parametrize("how", ["cut", "restart", "restart and lose"])
def test_a_lost_aggregator_costs_no_iteration(cluster: Any, train: Train, how: str) -> None:
    """Its channels break at any moment, it comes back with its regions or without."""
    stop = threading.Event()

    def break_things() -> None:
        while not stop.wait(0.02):
            if how == "cut":
                cluster.do(cluster.cut("a1"))
            else:
                cluster.do(cluster.restart("a1", lose=how.endswith("lose")))
            stop.wait(0.25)

    def program(agent: Agent) -> dict[str, np.ndarray]:
        for iteration in range(1, 61):
            stop.wait(0.01)
            parameters = agent.step(gradients(agent.rank, iteration))
        return copies(parameters)

    breaker = threading.Thread(target=break_things)

    def started(agent: Agent) -> dict[str, np.ndarray]:
        if agent.rank == 0:
            breaker.start()
        return program(agent)

    try:
        results = train(cluster, started, tensors=initial(), update=SGD)
    finally:
        stop.set()
        breaker.join()
    for parameters in results:
        check(parameters, 60)


def test_the_bus_is_not_needed_once_training_runs(
    cluster: Any, train: Train, own_nats_server: Any
) -> None:
    gone = threading.Barrier(2)

    def program(agent: Agent) -> dict[str, np.ndarray]:
        for iteration in range(1, 21):
            if iteration == 5 and gone.wait() == 0:
                own_nats_server.kill()
            parameters = agent.step(gradients(agent.rank, iteration))
        gone.wait()
        if agent.rank == 0:
            own_nats_server.restart()
        gone.wait()
        return copies(parameters)

    for parameters in train(cluster, program, tensors=initial(), update=SGD):
        check(parameters, 20)
    assert len(cluster.finished) == 2


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (np.zeros((7, 5), np.float32), "shape (7, 5), the tensor has (5, 7)"),
        (np.zeros((5, 7), np.float64), "dtype float64, the job's gradients are float32"),
        ([1.0], "a list, not a numpy array"),
    ],
)
def test_a_gradient_of_another_kind_is_refused_before_anything_moves(
    cluster: Any, train: Train, bad: Any, said: str
) -> None:
    def program(agent: Agent) -> dict[str, np.ndarray]:
        with pytest.raises(GradientRefused) as refused:
            agent.push("w", bad)
        error = refused.value
        assert (error.job, error.tensor, error.worker, error.iteration) == ("j1", "w", 0, 1)
        assert said in str(error)
        assert cluster.rings == 0
        return copies(agent.step(gradients(agent.rank, 1)))

    (parameters,) = train(cluster, program, workers=1, tensors=initial(), update=SGD)
    check(parameters, 1, workers=1)


def test_a_value_that_is_not_finite_is_refused_and_the_iteration_is_pushed_again(
    cluster: Any, train: Train
) -> None:
    """Rank 1 pushes a NaN in iteration 3; the others' pushes of it stand and are not counted
    twice when the whole step is repeated."""

    def program(agent: Agent) -> dict[str, np.ndarray]:
        for iteration in range(1, 7):
            made = gradients(agent.rank, iteration)
            if iteration == 3 and agent.rank == 1:
                poisoned = copies(made)
                poisoned["b"][2] = np.nan
                with pytest.raises(GradientRefused, match="tensor b, worker 1, iteration 3"):
                    agent.step(poisoned)
            parameters = agent.step(made)
        return copies(parameters)

    for parameters in train(cluster, program, tensors=initial(), update=SGD):
        check(parameters, 6)
    assert sorted(cluster.applied) == sorted(set(cluster.applied))


def test_only_the_refused_tensor_need_be_pushed_again(cluster: Any, train: Train) -> None:
    def program(agent: Agent) -> dict[str, np.ndarray]:
        made = gradients(agent.rank, 1)
        for name, gradient in made.items():
            agent.push(name, np.full_like(gradient, np.inf) if name == "b" else gradient)
        with pytest.raises(GradientRefused, match="tensor b"):
            agent.wait()
        agent.push("b", made["b"])
        agent.wait()
        return copies(agent.step(gradients(agent.rank, 2)))

    (parameters,) = train(cluster, program, workers=1, tensors=initial(), update=SGD)
    check(parameters, 2, workers=1)


def test_hyper_parameters_of_a_push_count_for_its_iteration(cluster: Any, train: Train) -> None:
    def program(agent: Agent) -> dict[str, np.ndarray]:
        with pytest.raises(Rejected, match="unknown hyper-parameter 'rate'"):
            agent.push("w", gradients(agent.rank, 1)["w"], rate=1.0)
        with pytest.raises(Rejected, match="learning_rate is nan"):
            agent.push("w", gradients(agent.rank, 1)["w"], learning_rate=float("nan"))
        agent.step(gradients(agent.rank, 1), learning_rate=0.125)
        return copies(agent.step(gradients(agent.rank, 2), learning_rate=0.125))

    for parameters in train(cluster, program, tensors=initial(), update=SGD):
        check(parameters, 2, rate=0.125)


def test_a_wait_that_cannot_end_says_what_it_waited_for(cluster: Any, train: Train) -> None:
    def program(agent: Agent) -> None:
        agent.step(gradients(agent.rank, 1))
        cluster.silent = True
        with pytest.raises(DeadlineExceeded) as late:
            agent.step(gradients(agent.rank, 2))
        text = str(late.value)
        for part in ("job j1, rank 0", "version 2 of bucket", "aggregator a1 (connected", "0.5 s"):
            assert part in text
        cluster.silent = False
        with pytest.raises(Rejected, match="missing"):
            agent.step({"w": gradients(0, 2)["w"]})

    train(cluster, program, workers=1, tensors=initial(), update=SGD, deadline_s=0.5)


def test_a_url_that_nobody_listens_on_is_named() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        Agent(job="j1", tensors={"w": (2,)}, url="nats://127.0.0.1:1", deadline_s=5.0)


def test_a_job_that_is_not_placed_in_time_is_said_to_be_so(cluster: Any) -> None:
    cluster.placed = False
    with pytest.raises(DeadlineExceeded, match="cluster c1 did not place it"):
        Agent(job="j1", tensors={"w": (2,)}, url=cluster.url, deadline_s=0.3)


def test_what_cannot_be_is_said_at_the_start(cluster: Any) -> None:
    def agent(**options: Any) -> Agent:
        settings: dict[str, Any] = {"job": "j1", "tensors": {"w": (2,)}, "deadline_s": 5.0}
        return Agent(**{"url": cluster.url, **settings, **options})

    for options, said in [
        ({"rank": 2, "workers": 2}, "rank 2 of 2 workers"),
        ({"tensors": {}}, "without tensors"),
        ({"tensors": {"w": (0,)}}, "extents must be whole"),
        ({"tensors": {"w": np.zeros(3)}}, "parameters are float32"),
        ({"job": None}, "but no job: give job="),
    ]:
        with pytest.raises(Rejected, match=said):
            agent(**options)
    with agent() as first:
        first.push("w", np.ones(2, np.float32))
        first.wait()
        with pytest.raises(Rejected, match="gradients are float32, this program's float16"):
            agent(gradient_dtype="float16")


ENDS = """
import sys
import numpy as np
from slackwater import Agent

agent = Agent(job="j1", tensors={{"w": (2,)}}, url="{url}")
agent.step({{"w": np.ones(2, np.float32)}})
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "done"),
    [("", 0, True), ("sys.exit(0)", 0, True), ("raise ValueError('bad data')", 1, False)],
)
def test_a_script_that_just_ends_is_done_and_one_that_fails_is_not(
    cluster: Any, tmp_path: Path, end: str, code: int, done: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDS.format(url=cluster.url, end=end))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLACKWATER_")}
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert [(f.rank, f.result) for f in cluster.finished] == ([(0, "")] if done else [])
    if not done:
        assert ended.stderr.splitlines()[-1] == "ValueError: bad data"
