"""The replay in one process: the textbook's update, whatever the chunks."""

import numpy as np
import pytest

from slackwater.common.domains.slots.rules import RULES, Hyper, divisor, mean, scalars, step
from slackwater.loadgen import emulate
from slackwater.loadgen.emulate import SLICE_ELEMENTS, Emulation
from slackwater.loadgen.verify import replay, replay_digest
from slackwater.schemas.tensors import DType, UpdateRule

RULE_NAMES = tuple(RULES)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", RULE_NAMES)
def test_a_replay_is_the_definition_applied_tensor_by_tensor(name: str, dtype: DType) -> None:
    """Against rules.py, the plain definition of a step, on whole tensors, for three workers."""
    emulation = Emulation("alexnet", bytes_scale=0.002, seed=5, gradient_dtype=dtype)
    update = UpdateRule(name=name, learning_rate=0.01)  # type: ignore[arg-type]
    sizes = [spec.shape[0] for spec in emulation.tensors]
    assert max(sizes) > SLICE_ELEMENTS  # One tensor at least is cut.
    got = replay(emulation, workers=3, iterations=4, update=update)
    for index in range(len(sizes)):
        p = emulate.initial(emulation, index)
        states = [np.zeros_like(p) for _ in range(RULES[name].states)]
        for t in range(1, 5):
            k = scalars(Hyper.of(update), t, divisor(name, 3))
            gradients = [emulate.gradient(emulation, index, w, t) for w in range(3)]
            p, new = step(name, mean(gradients, k), p, states, k)
            states = list(new)
        assert np.array_equal(got[index].view(np.uint32), p.view(np.uint32))


def test_a_digest_depends_on_every_iteration_and_worker_and_not_on_threads() -> None:
    emulation = Emulation("alexnet", bytes_scale=0.001, seed=5)
    update = UpdateRule()
    whole = replay_digest(emulation, 2, 5, update)
    assert whole == replay_digest(emulation, 2, 5, update, threads=1)
    assert (
        len({whole, replay_digest(emulation, 2, 4, update), replay_digest(emulation, 3, 5, update)})
        == 3
    )
