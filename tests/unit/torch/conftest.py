"""The binding without a cluster: the real Agent on an aggregator in this process, which makes
reading too early or too late visible."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")

from tests.in_process import InProcess

from slackwater.agent import Agent


class LoggedAgent(Agent):
    """Remembers what the binding did."""

    def __init__(self, **options: Any) -> None:
        self.log: list[str] = []
        self.closed: Any = None
        self.left = False
        Local.agents.append(self)
        super().__init__(**{"job": "local", "deadline_s": 60.0} | options)

    def push(self, name: str, gradient: Any = None, **hyper: float) -> None:
        self.log.append(f"push {name}")
        super().push(name, gradient, **hyper)

    def wait(self, names: Iterable[str] | None = None) -> int:
        names = list(self.tensors if names is None else names)
        self.log += [f"wait {name}" for name in names]
        return super().wait(names)

    def close(self, result: Any = None) -> None:
        self.closed = result
        super().close(result)

    def __exit__(self, *details: Any) -> None:
        self.left = True
        super().__exit__(*details)

    # For tests ------------------------------------------------------------------------------------

    def group(self, name: str) -> int:
        cell, position = self._places[name]
        return cell.tensors[position].group

    def master(self, name: str) -> Any:
        """The newest parameters, as the aggregator has them."""
        cell, position = self._places[name]
        return cell.buffer(position)

    def version(self, name: str) -> int:
        return self._places[name][0].version


class Local:
    """The cluster, and the Agents that were made."""

    agents: list[LoggedAgent] = []  # noqa: RUF012  # Emptied for each test.

    def __init__(self, cluster: InProcess) -> None:
        self.cluster = cluster

    @property
    def made(self) -> LoggedAgent:
        return self.agents[-1]


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Local]:
    """`request.param`: from which size on a tensor has a bucket of its own."""
    import slackwater.agent.exit_hook as ending
    import slackwater.torch.optimizer as binding

    cluster = InProcess(**({"bucket_bytes": request.param} if hasattr(request, "param") else {}))
    cluster.take_part(monkeypatch)
    monkeypatch.setattr(binding, "Agent", LoggedAgent)
    kept: list[Any] = []  # Holds them as the interpreter would.
    monkeypatch.setattr(ending.atexit, "register", kept.append)
    monkeypatch.setattr(ending, "_watch", lambda: None)
    Local.agents = []
    yield Local(cluster)
    Local.agents = []
