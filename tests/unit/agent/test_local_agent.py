"""Without a cluster: the same parameters, bit for bit, as the aggregators' kernels give."""

from pathlib import Path

import numpy as np
import pytest
from tests.unit.agent.test_agent_identity import started

from slackwater.agent import Agent
from slackwater.common.base.errors import GradientRefused, Rejected
from slackwater.common.domains.slots.folding import replay
from slackwater.common.domains.slots.rules import RULES
from slackwater.schemas.tensors import DType, UpdateRule

SHAPES: dict[str, tuple[int, ...]] = {"w": (300, 40), "b": (40,), "scale": ()}


@pytest.fixture(autouse=True)
def without_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLACKWATER_JOB", "SLACKWATER_RANK", "SLACKWATER_WORKERS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {name: np.asarray(rng.normal(size=s), np.float32) for name, s in SHAPES.items()}


def gradients(iteration: int, dtype: DType) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([1, iteration])
    kind = np.float16 if dtype == "float16" else np.float32
    return {name: np.asarray(rng.normal(size=shape), kind) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.sums])
def test_it_ends_at_the_bits_of_a_replay_of_one_worker(rule: str, dtype: DType) -> None:
    update = UpdateRule(name=rule, learning_rate=0.05, weight_decay=0.01)  # type: ignore[arg-type]
    with Agent(tensors=initial(), update=update, gradient_dtype=dtype) as agent:
        assert (agent.rank, agent.workers, agent.iteration) == (0, 1, 0)
        for iteration in range(1, 21):
            parameters = agent.step(gradients(iteration, dtype))
        assert agent.iteration == 20
        for name, values in initial().items():
            steps = [[gradients(k, dtype)[name].reshape(-1)] for k in range(1, 21)]
            expected = replay(update, dtype, values.reshape(-1), steps)
            assert parameters[name].tobytes() == expected.tobytes(), name


def test_a_refused_gradient_is_pushed_again() -> None:
    with Agent(tensors={"w": (3,)}, update=UpdateRule(learning_rate=1.0)) as agent:
        agent.push("w", np.array([1, np.inf, 1], np.float32))
        with pytest.raises(GradientRefused, match=r"rank 0.*iteration 1.*inf|inf"):
            agent.wait()
        agent.push("w", np.ones(3, np.float32))
        assert agent.wait() == 1
        np.testing.assert_array_equal(agent.pull("w"), [-1, -1, -1])


def test_hyper_parameters_of_a_push_count_and_views_outlive_the_end() -> None:
    agent = Agent(tensors={"w": (2,)})
    view = agent.step({"w": np.ones(2, np.float32)}, learning_rate=0.5)["w"]
    agent.close({"accuracy": 0.5})
    np.testing.assert_array_equal(view, [-0.5, -0.5])


def test_gradients_may_be_produced_in_place() -> None:
    with Agent(tensors={"w": (2,)}, consistency="asynchronous") as agent:
        agent.gradient_buffer("w")[:] = 2.0
        agent.push("w", learning_rate=0.5)
        np.testing.assert_array_equal(agent.pull("w"), [-1.0, -1.0])


def test_a_cluster_without_a_job_is_asked_about() -> None:
    with pytest.raises(Rejected, match=r"url=nats://x:1, but no job: give job="):
        Agent(tensors={"w": (2,)}, url="nats://x:1")


def test_a_script_that_fails_alone_keeps_its_traceback(tmp_path: Path) -> None:
    script = 'from slackwater import Agent\nAgent(tensors={"w": (2,)})\nraise KeyError("mine")'
    code, said = started(tmp_path, script)
    assert code == 1
    assert "KeyError: 'mine'" in said.splitlines()[-1]
