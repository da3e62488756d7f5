"""The binding without a cluster: an Agent that is its own aggregator, by the plain definition of
the rules, and that makes reading too early or too late visible."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from slackwater.agent.attached import ELEMENT
from slackwater.common.slots.rules import RULES, Hyper, scalars, step, widen

pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")


class LocalAgent:
    """One worker. Two parameter buffers take turns; the one that is to be written next is spoiled
    as soon as it may be, so that whoever still reads it is found out."""

    made: "LocalAgent"
    failing: Exception | None = None

    def __init__(
        self,
        *,
        tensors: dict[str, Any],
        groups: dict[str, int],
        gradient_dtype: str,
        update: Any,
        submitted_rule: str = "",
        job: str = "local",
        deadline_s: float = 1.0,
    ) -> None:
        self.job = job
        self.rule = submitted_rule or update.name
        self.iteration = 0
        self.update, self.groups, self.deadline_s = update, groups, deadline_s
        self.tensors = list(tensors)
        self.buffers = {
            name: [np.array(value, np.float32), np.full(value.shape, np.nan, np.float32)]
            for name, value in tensors.items()
        }
        self.slots = {
            name: np.zeros(value.shape, ELEMENT[gradient_dtype]) for name, value in tensors.items()
        }
        self.states: dict[str, Any] = {
            name: tuple(np.zeros(value.shape, np.float32) for _ in range(RULES[self.rule].states))
            for name, value in tensors.items()
        }
        self.version = dict.fromkeys(tensors, 0)
        self.pushed = dict.fromkeys(tensors, 0)
        self.log: list[str] = []
        self.hypers: list[tuple[str, dict[str, float]]] = []
        self.closed: Any = None
        self.left = False
        LocalAgent.made = self

    def gradient_buffer(self, name: str) -> Any:
        return self.slots[name]

    def push(self, name: str, gradient: None, **hyper: float) -> None:
        assert gradient is None
        self.log.append(f"push {name}")
        assert self.pushed[name] == self.version[name], "the slot is not free yet"
        self.pushed[name] += 1
        self.hypers.append((name, hyper))

    def wait(self, names: Iterable[str]) -> int:
        for name in names:
            self.log.append(f"wait {name}")
            if self.pushed[name] > self.version[name]:
                self._update(name)
        self.iteration = min(self.version.values())
        return self.iteration

    def _update(self, name: str) -> None:
        if LocalAgent.failing is not None:
            raise LocalAgent.failing
        old, new = self.version[name] & 1, 1 - (self.version[name] & 1)
        hyper = next(h for n, h in reversed(self.hypers) if n == name)
        k = scalars(Hyper(**{"learning_rate": 0.0} | hyper), self.version[name] + 1, 1)
        parameters, self.states[name] = step(
            self.rule, widen(self.slots[name]), self.buffers[name][old], self.states[name], k
        )
        self.buffers[name][new][...] = parameters
        self.version[name] += 1
        self.slots[name].fill(77)

    def parameters_buffer(self, name: str) -> Any:
        version = self.version[name]
        if version:
            self.buffers[name][1 - (version & 1)].fill(np.nan)
        return self.buffers[name][version & 1]

    def close(self, result: Any = None) -> None:
        self.closed = result

    def __exit__(self, *details: Any) -> None:
        self.left = True


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LocalAgent]]:
    import slackwater.torch.optimizer as binding

    monkeypatch.setattr(binding, "Agent", LocalAgent)
    kept: list[Any] = []  # As the interpreter keeps them.
    monkeypatch.setattr(binding.atexit, "register", kept.append)
    monkeypatch.setattr(binding, "_watch_for_crash", lambda: None)
    LocalAgent.failing = None
    yield LocalAgent
    LocalAgent.failing = None
