"""Elastic training ends at the same bits, whoever computes which virtual rank."""

import contextlib
import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.in_process import InProcess
from torch import nn

from slackwater.agent.journal import REPLAY, Journal
from slackwater.agent.virtual_agent import VirtualAgent
from slackwater.common.base.errors import Rejected
from slackwater.torch import Elastic

VIRTUAL = 4
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


CLUSTERS: list[InProcess] = []
torch.manual_seed(3)
NETWORK = nn.Sequential(
    nn.Linear(20, 33), nn.LayerNorm(33), nn.ReLU(), nn.Dropout(0.3), nn.Linear(33, 5)
)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(50, 20, generator=generator), torch.randint(0, 5, (50,), generator=generator)


def elastic(rule: str = "momentum", **options: Any) -> Elastic:
    model = copy.deepcopy(NETWORK)  # Workers are made in threads: none may draw.
    made = Elastic(
        OPTIMIZERS[rule](model.parameters()), model,
        **{"virtual_ranks": VIRTUAL, "seed": 7, "deadline_s": 10.0} | options,
    )  # fmt: skip
    made.model = model  # type: ignore[attr-defined]
    return made


def compute(worker: Elastic) -> list[int]:
    """Let a worker compute its part of an iteration; returns its virtual ranks."""
    images, labels = data()
    ranks = []
    for rank in worker.ranks():
        some = worker.indices(len(images), 6)
        noisy = images[some] + 0.1 * torch.from_numpy(np.random.randn(6, 20).astype(np.float32))
        loss = nn.functional.cross_entropy(worker.model(noisy), labels[some])  # type: ignore[attr-defined]
        loss.backward()
        ranks.append(rank)
    worker.step()
    return ranks


class Starting:
    """A worker that is being made, in a thread: that waits until others are there."""

    def __init__(self, folder: Path, rank: int, workers: int, **options: Any) -> None:
        self.made: Elastic | None = None
        self._options = {"job": "j", "rank": rank, "workers": workers, "folder": folder} | options
        self.thread = threading.Thread(target=self._start, daemon=True)
        self.thread.start()

    def _start(self) -> None:
        self.made = elastic(**self._options)

    @property
    def worker(self) -> Elastic:
        for _ in range(1000):
            with CLUSTERS[-1].lock:
                CLUSTERS[-1].deliver()  # Joiners wait for what rank 0 has rung.
            self.thread.join(0.02)
            if not self.thread.is_alive():
                break
        assert self.made is not None, "a worker did not come about"
        return self.made


def together(folder: Path, workers: int, **options: Any) -> list[Elastic]:
    """Start a job's workers: each waits until all are there."""
    starting = [Starting(folder, rank, workers, **options) for rank in reversed(range(workers))]
    return [each.worker for each in reversed(starting)]


def kill(worker: Elastic) -> None:
    """End a process as kill -9 does: its Agent says nothing any more."""
    worker._joined = False
    worker.agent._session._fail(Rejected("it was ended"))  # type: ignore[union-attr]
    worker.agent._give_up(None)


def digests(workers: Sequence[Elastic], iterations: int) -> list[str]:
    found = []
    for _ in range(iterations):
        for worker in workers:
            compute(worker)
        found.append(workers[0].digest())
        assert all(worker.digest() == found[-1] for worker in workers)
    return found


def alone(rule: str, iterations: int) -> list[str]:
    made = elastic(rule, job=None)
    return digests([made], iterations)


@pytest.fixture(autouse=True)
def no_handler(monkeypatch: pytest.MonkeyPatch, local: Any) -> None:
    """Keep the handler of SIGTERM: tests start workers in several threads."""
    CLUSTERS.append(local.cluster)
    import slackwater.torch.elastic as module

    monkeypatch.setattr(module.signal, "signal", lambda number, handler: None)


@pytest.mark.parametrize("rule", list(OPTIMIZERS))
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_number_of_workers_ends_at_the_bits_of_one_process(
    tmp_path: Path, rule: str, workers: int
) -> None:
    job = together(tmp_path, workers, rule=rule)
    assert digests(job, 6) == alone(rule, 6)


class Resized:
    """A job in lock step: rank 0 decides, those who join are made in threads."""

    def __init__(self, folder: Path, workers: int, rule: str) -> None:
        self.folder, self.rule = folder, rule
        self.workers = dict(enumerate(together(folder, workers, rule=rule)))
        self.starting: dict[int, Starting] = {}
        self.found: list[str] = []

    @property
    def first(self) -> Elastic:
        return self.workers[0]

    def scale(self, wanted: int) -> None:
        for rank in range(len(self.workers), wanted):
            self.starting[rank] = Starting(self.folder, rank, wanted, rule=self.rule)
        session: Any = self.first.agent._session
        session.sizing.wanted = wanted

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            compute(self.first)
            count = self.first._workers
            for rank in [rank for rank in self.starting if rank < count]:
                self.workers[rank] = self.starting.pop(rank).worker
            for rank in [rank for rank in self.workers if rank >= count]:
                kill(self.workers.pop(rank))
            for worker in self.workers.values():
                while worker.iteration < self.first.iteration:
                    compute(worker)
            self.found.append(self.first.digest())


@pytest.mark.parametrize("local", [3000], indirect=True)
@pytest.mark.parametrize("rule", list(OPTIMIZERS))
def test_a_resized_job_ends_at_the_bits_of_one_process(
    tmp_path: Path, local: Any, rule: str
) -> None:
    """4, 2, 3 and 1 workers, and 4 again; more than one bucket."""
    job = Resized(tmp_path, 4, rule)
    job.train(2)
    for wanted in (2, 3, 1, 4):
        job.scale(wanted)
        job.train(4)
        assert len(job.workers) == wanted
    assert job.found == alone(rule, len(job.found))
    entries = Journal(tmp_path / "journal.jsonl").entries()
    seen = [(each.what, each.workers) for each in entries if each.what in ("start", "resize")]
    assert seen == [("start", 4), ("resize", 2), ("resize", 3), ("resize", 1), ("resize", 4)]
    assert entries[0].assignment == ((0, 1), (1, 2), (2, 3), (3, 4))


class Killed(Exception):
    """Stands for a signal in the middle of a push."""


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a worker die at its n-th push from now on."""
    left: dict[Any, int] = {}
    push = VirtualAgent.push

    def counted(self: Any, *arguments: Any, **hyper: float) -> None:
        if self in left:
            left[self] -= 1
            if left[self] < 0:
                raise Killed
        push(self, *arguments, **hyper)

    monkeypatch.setattr(VirtualAgent, "push", counted)
    return lambda worker, pushes: left.__setitem__(worker.agent, pushes)


@pytest.mark.parametrize("local", [1500], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pushes", [0, 1, 5, 7, 9, 10, 11])
def test_a_worker_that_is_killed_at_any_push_pushes_the_same_bits_again(
    tmp_path: Path, local: Any, after: Any, rank: int, pushes: int
) -> None:
    """The other worker has pushed all: some buckets have the next version, others have not."""
    job = together(tmp_path, 2, rule="adam")
    found = digests(job, 2)
    compute(job[1 - rank])
    after(job[rank], pushes)
    with pytest.raises(Killed):
        compute(job[rank])
    kill(job[rank])
    job[rank] = Starting(tmp_path, rank, 2, rule="adam").worker
    assert job[rank].iteration == 2
    compute(job[rank])
    found.append(job[0].digest())
    found += digests(job, 2)
    assert found == alone("adam", 5)


@pytest.mark.parametrize("local", [1500], indirect=True)
@pytest.mark.parametrize(("before", "then"), [(2, 3), (4, 2), (3, 1), (2, 4)])
@pytest.mark.parametrize("pushes", [3, 7])
def test_a_job_paused_in_mid_iteration_goes_on_with_another_number(
    tmp_path: Path, local: Any, after: Any, before: int, then: int, pushes: int
) -> None:
    """Found by thinking: a rank of the new attempt that attaches before rank 0 must not take the
    old attempt's number for its own."""
    job = together(tmp_path, before, rule="momentum")
    found = digests(job, 2)
    for worker in job[:-1]:
        compute(worker)
    after(job[-1], pushes)
    with contextlib.suppress(Killed):
        compute(job[-1])
    for worker in job:
        kill(worker)
    local.cluster.attempt += 1
    job = together(tmp_path, then, rule="momentum")
    done = job[0].iteration
    assert {worker.iteration for worker in job} == {done}
    expected = alone("momentum", 5)
    assert found == expected[:2]
    assert digests(job, 5 - done) == expected[done:]


def test_a_job_stopped_after_its_end_has_one_end_in_its_journal(tmp_path: Path) -> None:
    """Found on a live cluster: paused between rank 0's end and that of the others, it went on, and
    wrote a second end, of one worker."""
    job = together(tmp_path, 2)
    digests(job, 3)
    for worker in job:
        worker.close()
    for worker in together(tmp_path, 2):
        worker.close()
    said = [(each.what, each.workers) for each in Journal(tmp_path / "journal.jsonl").entries()]
    assert said == [("start", 2), ("end", 2)]


def test_a_replay_follows_the_journal_and_names_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = together(tmp_path, 2, rule="adam")
    digests(job, 3)
    job[0].close()
    monkeypatch.setenv(REPLAY, str(tmp_path / "journal.jsonl"))
    alone("adam", 3)
    with pytest.raises(Rejected, match=r"iteration 0 .start.: seed is 8, the journal says 7"):
        compute(elastic("adam", job=None, seed=8))
    with pytest.raises(Rejected, match=r"rate is 0\.1, the journal says 0\.01"):
        compute(elastic("momentum", job=None))


# Refusals -----------------------------------------------------------------------------------------


def test_running_statistics_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Rejected, match=r"1 \(BatchNorm1d\) has running statistics.*GroupNorm"):
        Elastic(optimizer, model, virtual_ranks=2, job=None)


def test_a_buffer_that_training_changes_is_refused_by_name() -> None:
    """A constant buffer is not."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.register_buffer("constant", torch.ones(3))
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            made: torch.Tensor = self.inner(x) + self.constant
            return made

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Elastic(optimizer, model, virtual_ranks=2, job=None)
    ranks = made.ranks()
    next(ranks)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(Rejected, match="buffer seen was changed in training"):
        next(ranks)


def test_what_belongs_to_no_virtual_rank_is_refused(tmp_path: Path) -> None:
    made = elastic(job=None)
    with pytest.raises(Rejected, match="belongs to no virtual rank"):
        made.model(data()[0]).sum().backward()  # type: ignore[attr-defined]
    with pytest.raises(Rejected, match=r"call it in elastic.ranks\(\)"):
        made.indices(50, 6)
    for _ in made.ranks():
        break
    with pytest.raises(Rejected, match=r"virtual ranks \[0, 1, 2, 3\] are not computed"):
        made.step()


def test_an_epoch_has_each_example_once_whatever_the_number_of_workers() -> None:
    """50 examples, 4 virtual ranks of 5: the first epoch ends within the third iteration."""
    made = elastic(job=None)
    seen: list[int] = []
    for _ in range(5):
        for _ in made.ranks():
            seen += made.indices(50, 5).tolist()
        made.step()
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50))
    assert seen[:50] != seen[50:]


def test_gradients_may_be_clipped_for_each_virtual_rank(tmp_path: Path) -> None:
    """By two workers, and by one."""

    def clipped(workers: Sequence[Elastic]) -> str:
        images, labels = data()
        for _ in range(3):
            for worker in workers:
                for _ in worker.ranks():
                    some = worker.indices(len(images), 6)
                    model: nn.Module = worker.model  # type: ignore[attr-defined]
                    nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                worker.step()
        return workers[0].digest()

    job = together(tmp_path, 2, overlap=False)
    assert clipped(job) == clipped([elastic(job=None, overlap=False)])
