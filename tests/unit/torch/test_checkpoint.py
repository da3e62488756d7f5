"""Plain PyTorch scripts that are told to end, or killed, and started again. Each starts Python with
torch several times, which takes seconds each."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset  # noqa: E402

import slackwater.torch  # noqa: E402
from slackwater.common.base.checkpoint_folder import CheckpointFolder  # noqa: E402
from slackwater.common.base.errors import Rejected  # noqa: E402
from slackwater.torch.positions import epoch_state, random_states, resumed, set_random_states  # noqa: E402
from slackwater.torch.staging import Staging  # noqa: E402
from slackwater.torch.training_state import PAUSED  # noqa: E402

PROGRAM = Path(__file__).with_name("checkpoint_program.py")
WAIT_S = 120.0


class Script:
    """The processes of one attempt."""

    def __init__(
        self, tmp_path: Path, *, ranks: int = 1, pause_s: float = 0.0, interval_s: float = 0.0
    ) -> None:
        self.result, self.folder = tmp_path / "result", tmp_path / "checkpoints"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in range(ranks):
            gang = {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }  # fmt: skip
            environment = {"SLACKWATER_CHECKPOINT": str(self.folder)} | (gang if ranks > 1 else {})
            result = self.result if rank == 0 else Path(f"{self.result}.{rank}")
            words = [str(result), "4", str(interval_s), str(pause_s)]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, PROGRAM, *words],
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def reach(self, iteration: int) -> list[str]:
        """Wait until rank 0 has done so many iterations; return what it printed."""
        seen = []
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            seen.append(line)
            if line.startswith("iteration") and int(line.split()[1]) >= iteration:
                return seen
        raise AssertionError("".join(seen))

    def end(self, how: signal.Signals | None = None, only: int | None = None) -> list[str]:
        for rank, process in enumerate(self.processes):
            if how is not None and only in (None, rank):
                process.send_signal(how)
        return [process.communicate(timeout=WAIT_S)[0] for process in self.processes]

    @property
    def codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = Script(tmp_path_factory.mktemp("undisturbed"))
    out = script.end()
    assert script.codes == [0], out
    return script.result.read_text()


@pytest.mark.timeout(300)
def test_a_script_that_is_told_to_end_goes_on_at_the_same_bits(
    tmp_path: Path, undisturbed: str
) -> None:
    """Twice: in the middle of an epoch, and of a later one. Model, optimiser, schedule, order of
    batches, dropout and three random generators are those of a run that nobody stopped."""
    for iteration in (5, 30):
        script = Script(tmp_path, interval_s=1000.0, pause_s=0.05)
        script.reach(iteration)
        out = script.end(signal.SIGTERM)
        assert script.codes == [PAUSED], out
        assert "saved at iteration" in out[0]
    script = Script(tmp_path)
    out = script.end()
    assert script.codes == [0]
    assert "goes on at iteration 3" in out[0]
    assert script.result.read_text() == undisturbed


@pytest.mark.timeout(300)
def test_kills_lose_at_most_what_was_not_saved(tmp_path: Path, undisturbed: str) -> None:
    """Killed at random instants, while it writes after nearly every iteration: what is found is
    whole, never older than the last save but two, and the end is that of an undisturbed run."""
    rng, reached = random.Random(7), 0
    for _ in range(4):
        script = Script(tmp_path, pause_s=0.02)
        seen = script.reach(reached + 3)
        time.sleep(rng.random() * 0.1)
        script.end(signal.SIGKILL)
        first = next(int(line.split()[1]) for line in seen if line.startswith("iteration"))
        assert first >= reached
        folder = CheckpointFolder(script.folder)
        newest = next((s[0] for s in folder.sets()), None)
        if newest is not None:
            assert folder.damage(newest) == ""
            reached = max(reached, newest.iteration)
        assert len(folder.sets()) <= 3
    script = Script(tmp_path)
    out = script.end()
    assert script.codes == [0], out
    assert script.result.read_text() == undisturbed


@pytest.mark.timeout(300)
def test_ranks_of_a_ddp_job_end_after_the_same_iteration(tmp_path: Path) -> None:
    """One rank alone is told to end; both save, and both runs end at the same bits."""
    whole = Script(tmp_path / "whole", ranks=2)
    (tmp_path / "whole").mkdir()
    out = whole.end()
    assert whole.codes == [0, 0], out
    script = Script(tmp_path, ranks=2, interval_s=0.2, pause_s=0.05)
    script.reach(8)
    out = script.end(signal.SIGTERM, only=1)
    assert script.codes == [PAUSED, PAUSED], out
    parts = CheckpointFolder(script.folder).sets()[0]
    assert [part.part for part in parts] == [0, 1]
    script = Script(tmp_path, ranks=2)
    out = script.end()
    assert script.codes == [0, 0], out
    assert f"goes on at iteration {parts[0].iteration}" in out[0]
    for rank in ("", ".1"):
        expected = Path(f"{whole.result}{rank}").read_text()
        assert Path(f"{script.result}{rank}").read_text() == expected


# In this process ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def sigterm_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def trained(folder: Path, total: int, **options: Any) -> Any:
    """Train a layer for so many iterations in all."""
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = slackwater.torch.checkpoint(
        folder=folder, model=model, optimizer=optimizer, **{"interval_s": 1000.0} | options
    )
    for _ in state.steps(total):
        optimizer.zero_grad()
        model(torch.rand(2, 4)).square().sum().backward()
        optimizer.step()
    state._lock.release()
    return state, model


def test_a_damaged_file_is_told_and_the_one_before_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, undisturbed = trained(tmp_path / "whole", 9)
    for total in (3, 6):
        trained(tmp_path, total)
    newest = tmp_path / "iteration-000000000006.0of1.pt"
    payload = bytearray(newest.read_bytes())
    payload[len(payload) // 2] ^= 1
    newest.write_bytes(payload)
    capsys.readouterr()
    _, model = trained(tmp_path, 9)
    said = capsys.readouterr().err
    assert "iteration 6 is skipped" in said
    assert "does not have the bytes that were written" in said
    assert "goes on at iteration 3" in said
    assert torch.equal(model.weight, undisturbed.weight)
    kept = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert kept == [f"iteration-00000000000{n}.0of1.pt" for n in (3, 9)]


def test_two_are_kept_and_any_torch_reads_them(tmp_path: Path) -> None:
    for total in (2, 4):
        trained(tmp_path, total)
    _, model = trained(tmp_path, 6)
    kept = sorted(int(path.name[10:22]) for path in tmp_path.glob("*.pt"))
    assert kept == [4, 6]
    found = torch.load(tmp_path / f"iteration-{6:012d}.0of1.pt", weights_only=True)
    assert torch.equal(found["parts"]["model"]["weight"], model.weight)
    assert not list(tmp_path.glob("*.new"))


def test_a_save_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slackwater.common.base.checkpoint_folder.make_durable", full)
    state, _ = trained(tmp_path, 4)
    assert state.iteration == 4
    assert "No space left on device; the one before stays" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing to save"),
        ({"model": 3}, "without state_dict"),
        ({"model": torch.nn.Linear(1, 1), "interval_s": -1.0}, "interval_s is -1"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(Rejected, match=said):
        slackwater.torch.checkpoint(folder=tmp_path, **options)


def test_a_state_that_could_not_be_given_back_is_refused_by_name(tmp_path: Path) -> None:
    class Strange:
        def state_dict(self) -> Any:
            return {"path": Path("here")}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("never saved")

    state = slackwater.torch.checkpoint(folder=tmp_path, strange=Strange())
    state.step()
    with pytest.raises(Rejected, match="the state of strange"):
        state.save(wait=True)
    assert CheckpointFolder(tmp_path).sets() == []


def test_another_model_or_another_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 2)
    with pytest.raises(Rejected, match=r"has model, optimizer, this program gives other"):
        slackwater.torch.checkpoint(folder=tmp_path, other=torch.nn.Linear(1, 1))
    monkeypatch.setattr("slackwater.torch.training_state._LOCK_S", 0.1)
    with pytest.raises(Rejected, match=r"keeps its checkpoints in .*, too, as rank 0"):
        slackwater.torch.checkpoint(folder=tmp_path, model=torch.nn.Linear(1, 1))


class _Stream(IterableDataset[Any]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter(range(24))


def loaders() -> dict[str, Any]:
    data = TensorDataset(torch.arange(24))
    own = torch.Generator().manual_seed(9)
    return {
        "in order": DataLoader(data, batch_size=4),
        "shuffled": DataLoader(data, batch_size=4, shuffle=True),
        "generator": DataLoader(data, batch_size=4, shuffle=True, generator=own),
        "sampler": DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=own)),
        "by hand": DataLoader(data, batch_size=None, shuffle=True),
        "stream": DataLoader(_Stream(), batch_size=4),
        "list": list(range(9)),
    }


@pytest.mark.parametrize("kind", list(loaders()))
@pytest.mark.parametrize("used", [1, 5])
def test_an_epoch_goes_on_with_the_batches_that_are_left(kind: str, used: int) -> None:
    """Also the numbers that the program draws afterwards are the same."""
    loader = loaders()[kind]
    begun, seen, at = epoch_state(loader), [], random_states()
    for number, batch in enumerate(loader, 1):
        seen.append((str(batch), random.random()))
        if number == used:
            at = random_states()
    after = torch.rand(2), random.random()
    torch.manual_seed(12345)
    rest = resumed(loaders()[kind], begun, used, lambda: set_random_states(at))
    assert [(str(batch), random.random()) for batch in rest] == seen[used:]
    assert torch.equal(torch.rand(2), after[0])
    assert random.random() == after[1]


def test_a_staged_copy_is_of_the_moment_and_keeps_shared_weights_shared() -> None:
    weight = torch.randn(5, 3).t()
    state = {"a": weight, "b": weight, "n": torch.tensor(True), "none": torch.empty(0), "l": [1, 2]}
    staged = Staging().copy(state)
    before = weight.clone()
    weight += 1
    state["l"].append(3)
    assert torch.equal(staged["a"], before)
    assert staged["a"] is staged["b"]
    assert staged["n"].item() is True
    assert staged["none"].numel() == 0
    assert staged["l"] == [1, 2]


# The folder ---------------------------------------------------------------------------------------


class _Crash(BaseException):
    """The process is gone."""


def test_a_crash_at_any_instant_leaves_the_set_before_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the disk is the last one, in turn: what is found is the old set or
    the new one, whole; a folder that is gone on with ends with the new one."""
    for last in count(1):
        path = tmp_path / str(last)
        folder = CheckpointFolder(path)
        folder.write(1, 0, 1, "torch", lambda fresh: fresh.write_bytes(b"old") and None)
        left = last

        def counted(call: Any) -> Any:
            def step(*words: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise _Crash
                return call(*words, **options)

            return step

        with monkeypatch.context() as patch:
            for owner, name in (
                (os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "write_bytes"),
            ):  # fmt: skip
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                folder.write(2, 0, 1, "torch", lambda fresh: fresh.write_bytes(b"new") and None)
                crashed = False
            except _Crash:
                crashed = True
        newest = CheckpointFolder(path).sets()[0][0]
        assert folder.damage(newest) == ""
        assert (path / newest.file).read_bytes() == (b"old" if newest.iteration == 1 else b"new")
        if not crashed:
            assert newest.iteration == 2
            break
        folder.clear(0, newest.iteration)
        left_over = {each.name for each in path.iterdir()}
        assert left_over == {
            f"iteration-{each[0].iteration:012d}.0of1.{kind}"
            for each in folder.sets()
            for kind in ("pt", "json")
        }
    assert last > 5


def test_a_set_counts_once_all_its_parts_are_there(tmp_path: Path) -> None:
    """Parts of a former life never complete a set of this one."""
    folder = CheckpointFolder(tmp_path)

    def save(iteration: int, part: int) -> None:
        folder.write(iteration, part, 2, "torch", lambda fresh: fresh.write_bytes(b"x") and None)

    for iteration in (1, 2, 3):
        save(iteration, 0)
        save(iteration, 1)
    save(4, 0)
    assert [parts[0].iteration for parts in folder.sets()] == [3, 2, 1]
    assert folder.unfinished(3) == [4]
    folder.prune()
    assert [parts[0].iteration for parts in folder.sets()] == [3, 2]
    folder.clear(0, 3)
    save(4, 1)
    assert [parts[0].iteration for parts in folder.sets()] == [3, 2]
