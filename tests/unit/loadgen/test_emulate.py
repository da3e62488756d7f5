"""The emulated job: its bytes are determined by four numbers, its time by the model's shape."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.loadgen import emulate, models
from slackwater.loadgen.emulate import POOL_ELEMENTS, SLICE_ELEMENTS, Emulation
from slackwater.schemas.tensors import DType

VGG = Emulation("vgg19", bytes_scale=0.01, seed=7)
numbers = st.integers(0, 2**40)


@given(numbers, st.integers(0, 500), st.integers(0, 63), st.integers(1, 10**6))
def test_an_offset_lies_in_the_pool(seed: int, tensor: int, worker: int, iteration: int) -> None:
    assert 0 <= emulate.offset(seed, tensor, worker, iteration) < POOL_ELEMENTS


def test_offsets_of_neighbouring_numbers_are_spread() -> None:
    """Tensors, workers and iterations of one job hardly ever share a gradient."""
    offsets = {
        emulate.offset(1, tensor, worker, iteration)
        for tensor in range(20)
        for worker in range(4)
        for iteration in range(20)
    }
    assert len(offsets) > 1590


@given(st.integers(1, 3 * POOL_ELEMENTS), st.integers(0, POOL_ELEMENTS - 1))
def test_a_gradient_is_the_pool_read_round_and_round(size: int, start: int) -> None:
    ring = np.concatenate([np.arange(POOL_ELEMENTS), np.arange(SLICE_ELEMENTS)]).astype(np.float32)
    flat = np.empty(size, np.float32)
    emulate._fill(flat, ring, start)
    assert np.array_equal(flat, (np.arange(size) + start) % POOL_ELEMENTS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_slices_are_the_gradient(dtype: DType) -> None:
    emulation = Emulation("vgg19", bytes_scale=0.01, seed=3, gradient_dtype=dtype)
    tensor = 32  # fc6, the one that is longer than the pool.
    whole = emulate.gradient(emulation, tensor, worker=1, iteration=5)
    assert whole.size > POOL_ELEMENTS
    parts = [
        emulate.gradient_slice(
            emulation, tensor, 1, 5, first, min(SLICE_ELEMENTS, whole.size - first)
        )
        for first in range(0, whole.size, SLICE_ELEMENTS)
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(whole, emulate.gradient(emulation, tensor, worker=0, iteration=5))


def test_gradients_are_what_they_were_yesterday() -> None:
    """A replay in another process, or of an old report, must find the same bytes."""
    drawn = emulate.gradient(VGG, 0, worker=0, iteration=1)
    assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == "f36dd315b75beadc"


class Still:
    """An agent whose parameters are always there; it writes down what is asked of it."""

    rank = 0

    def __init__(self, emulation: Emulation) -> None:
        self.iteration = 0
        self.calls: list[tuple[str, str]] = []
        self._buffers = {s.name: np.empty(s.shape, np.float32) for s in emulation.tensors}

    def ready(self, names: list[str]) -> bool:
        return True

    def gradient_buffer(self, name: str) -> Any:
        return self._buffers[name]

    def push(self, name: str) -> None:
        self.calls.append(("pushed", name))

    def wait(self, names: list[str] | None = None) -> None:
        if names is None:
            self.iteration += 1
        else:
            self.calls += [("needed", name) for name in names]

    def pull(self, name: str) -> Any:
        return self._buffers[name]

    def versions(self) -> tuple[int, int]:
        return self.iteration, self.iteration


def test_an_iteration_needs_layers_forward_and_pushes_them_backward() -> None:
    agent = Still(VGG)
    result = emulate.run(VGG, agent, compute_s=0.0, iterations=1)  # type: ignore[arg-type]
    names = [spec.name for spec in models.tensors("vgg19", 0.01)]
    assert agent.calls == [("needed", name) for name in names] + [
        ("pushed", name) for name in reversed(names)
    ]
    last = emulate.gradient(VGG, 37, worker=0, iteration=1)
    assert np.array_equal(agent.pull(names[37]).reshape(-1), last)
    assert result["digest"] == emulate.digest([agent.pull(name) for name in names])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "vgg20"], "unknown model 'vgg20'"),
        (["--model", "vgg19", "--bytes-scale", "0"], "bytes_scale is 0.0"),
        (["--model", "vgg19", "--iterations", "0"], "iterations 0"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_64(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = ["--compute-s", "0.1"]
    if "--iterations" not in arguments:
        defaults += ["--iterations", "1"]
    assert emulate.main([*arguments, *defaults]) == 64
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
