"""Files of an elastic run: the driver's journal, states of executors, and each host's sealed batch.

    FOLDER/journal.jsonl                     the driver's, a line each entry
    FOLDER/run-ID/states/EXECUTOR-MOVE       states that executors had when they left a host
    FOLDER/run-ID/host-RANK/batch            updates and completions of its newest batch
    FOLDER/run-ID/host-RANK/EXECUTOR-MOVE-NUMBER    an executor's state as of that batch

A file is written under another name, then renamed: whoever is killed leaves it whole or as it was.
They outlive processes, not machines, so nothing waits for a disk. After a run that ended well the
journal alone is left.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from slackwater.agent.table_rows import RowUpdates
from slackwater.common.base.errors import Fatal, Rejected
from slackwater.common.base.packing import ARRAYS
from slackwater.common.base.saved_program import JOURNAL, STATES
from slackwater.elastic.cache import Update
from slackwater.elastic.host import Batch
from slackwater.schemas.elastic import Completion, Entry, ExecutorPlaced, RunBegun, RunStands

_NAME: Final = re.compile(r"(\d+)-(\d+)-(\d+)")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


def _write(path: Path, data: bytes) -> None:
    """Raises Fatal."""
    try:
        draft = path.with_name(f"{path.name}.new")
        draft.write_bytes(data)
        draft.replace(path)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> Fatal:
    return Fatal(
        f"{path} cannot be written: {error.strerror}; make room there, or give the job another "
        "folder by --checkpoint"
    )


class RunJournal:
    """The driver's journal in a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises Rejected."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Rejected(
                f"{folder}: {error.strerror}; give the job a folder by --checkpoint"
            ) from error
        self._path = folder / JOURNAL
        self._file: int | None = None
        self._run = ""
        """That of the state which was kept last."""
        self._kept: dict[int, set[int]] = {}
        """Executor -> the moves of its states that are here."""
        self.lines = 0
        """Lines that were read or written."""

    def entries(self) -> list[Entry]:
        """Return what is there. Half a line at the end, of a driver that was killed, is cut off.
        Raises Rejected for a line that cannot be read."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._path, whole)
        found = []
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                found.append(_decode(line))
            except msgspec.DecodeError as error:
                raise Rejected(
                    f"{self._path}, line {number}: {error}; take the file away, and run the job "
                    "again"
                ) from error
        self.lines = len(found)
        self._know(found)
        return found

    def _know(self, entries: Iterable[Entry]) -> None:
        """Note which states there are, by what a journal says."""
        for entry in entries:
            places = entry.places if isinstance(entry, RunStands) else (entry,)
            for place in places:
                if isinstance(place, ExecutorPlaced) and place.state:
                    self._kept[place.executor] = {place.state}

    def adopt(self, saved: Path, run: str, entries: list[Entry]) -> None:
        """Take over the states of a saved program, and `entries`, as those of a new run. Raises
        Fatal."""
        self._begin(run)
        self._know(entries)
        if (saved / STATES).is_dir():
            try:
                shutil.copytree(saved / STATES, self._states(run))
            except OSError as error:
                raise _not_written(self._states(run), error) from error
        _write(self._path, b"".join(_encode(entry) + b"\n" for entry in entries))
        self.lines = len(entries)

    def shorten(self, entry: RunStands) -> None:
        """Put a line into the place of all that there are. Raises Fatal."""
        self.close()
        _write(self._path, _encode(entry) + b"\n")
        self.lines = 1

    def write(self, entry: Entry) -> None:
        """Add a line; the first one of a run ends what there was. Raises Fatal."""
        line = _encode(entry) + b"\n"
        try:
            if isinstance(entry, RunBegun):
                self._begin(entry.run)
            if self._file is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
            written = os.write(self._file, line)
        except OSError as error:
            raise _not_written(self._path, error) from error
        if written < len(line):
            raise Fatal(f"{self._path} was not written whole; make room there")
        self.lines += 1
        if isinstance(entry, ExecutorPlaced) and entry.state == entry.move:
            self._drop_older(entry)

    def _drop_older(self, entry: ExecutorPlaced) -> None:
        """Remove states that an executor had at former moves."""
        for move in self._kept.get(entry.executor, set()) - {entry.state}:
            self._state(self._run, entry.executor, move).unlink(missing_ok=True)
        self._kept[entry.executor] = {entry.state}

    def _begin(self, run: str) -> None:
        self.close()
        self._path.unlink(missing_ok=True)
        self.lines = 0
        self._kept.clear()
        for other in self.folder.glob("run-*"):
            if other.name != f"run-{run}":
                shutil.rmtree(other, ignore_errors=True)

    def keep(self, run: str, executor: int, move: int, state: bytes) -> None:
        """Keep the state that an executor had at a move; those of former moves stay until its place
        is written. Raises Fatal."""
        self._run = run
        self._kept.setdefault(executor, set()).add(move)
        path = self._state(run, executor, move)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_written(path, error) from error
        _write(path, state)

    def state(self, run: str, executor: int, move: int) -> bytes:
        """Return a state that was kept. Raises Rejected."""
        path = self._state(run, executor, move)
        try:
            return path.read_bytes()
        except OSError as error:
            raise Rejected(
                f"{path}: {error.strerror}: the state of executor {executor} is lost"
            ) from error

    def _state(self, run: str, executor: int, move: int) -> Path:
        return self._states(run) / f"{executor}-{move}"

    def _states(self, run: str) -> Path:
        return self.folder / f"run-{run}" / STATES

    def remove_states(self, run: str) -> None:
        """Remove executors' states: the run is over. The journal stays, and says so."""
        shutil.rmtree(self._states(run), ignore_errors=True)

    def close(self) -> None:
        """Write no more. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class NoFiles:
    """Stands for the files of a program that runs alone: nothing outlives its process."""

    durable = False

    def seal(self, batch: Batch) -> None:
        """Keep nothing, as all the others do."""

    def sealed(self) -> Batch | None:
        return None

    def keep(self, executor: int, move: int, number: int, state: bytes) -> None: ...

    def kept(self, executor: int, move: int, number: int) -> bytes | None:
        return None

    def settle(self, number: int) -> None: ...

    def forget(self, executor: int) -> None: ...

    def remove(self) -> None: ...


class HostFolder:
    """The files of one rank, in one run."""

    durable = True

    def __init__(self, folder: Path, run: str, rank: int) -> None:
        """Raises Rejected."""
        self._has_new = False
        """A state was kept since the last batch."""
        self._folder = folder / f"run-{run}" / f"host-{rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Rejected(
                f"{self._folder}: {error.strerror}; give the job a folder by --checkpoint"
            ) from error

    def seal(self, batch: Batch) -> None:
        """Raises Fatal."""
        packed = ARRAYS.pack(
            {
                "number": batch.number,
                "completions": [[each.order, each.result] for each in batch.completions],
                "deltas": {
                    name: tuple(delta) if isinstance(delta, RowUpdates) else delta
                    for name, delta in batch.deltas.items()
                },
                "counts": dict(batch.counts),
            }
        )
        _write(self._folder / "batch", packed)
        if self._has_new:
            self._drop_older(batch.number)
            self._has_new = False

    def _drop_older(self, number: int) -> None:
        """Remove states that a sealed one of the same move has replaced."""
        newest: dict[tuple[int, int], int] = {}
        states = self._states()
        for executor, move, at in states:
            if at <= number:
                newest[executor, move] = max(at, newest.get((executor, move), 0))
        for (executor, move, at), path in states.items():
            if at < newest.get((executor, move), 0):
                path.unlink(missing_ok=True)

    def sealed(self) -> Batch | None:
        """Raises Rejected."""
        try:
            data = (self._folder / "batch").read_bytes()
        except FileNotFoundError:
            return None
        found = ARRAYS.unpack(data)
        completions = tuple(Completion(order=o, result=r) for o, r in found["completions"])
        deltas: Mapping[str, Update] = {
            name: RowUpdates(*delta) if isinstance(delta, tuple) else delta
            for name, delta in found["deltas"].items()
        }
        return Batch(found["number"], completions, deltas, found["counts"])

    def keep(self, executor: int, move: int, number: int, state: bytes) -> None:
        """Raises Fatal."""
        _write(self._folder / f"{executor}-{move}-{number}", state)
        self._has_new = True

    def kept(self, executor: int, move: int, number: int) -> bytes | None:
        """Return the newest up to `number`; None: there is none."""
        fitting = [
            (key[2], path)
            for key, path in self._states().items()
            if key[:2] == (executor, move) and key[2] <= number
        ]
        return max(fitting)[1].read_bytes() if fitting else None

    def settle(self, number: int) -> None:
        """Forget states of batches after this one."""
        for key, path in self._states().items():
            if key[2] > number:
                path.unlink(missing_ok=True)

    def forget(self, executor: int) -> None:
        """Forget all states of the executor."""
        for key, path in self._states().items():
            if key[0] == executor:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all of it: the run is over."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # Files of others are in it still.
            self._folder.parent.rmdir()

    def _states(self) -> dict[tuple[int, int, int], Path]:
        found = {}
        for path in self._folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                executor, move, number = map(int, match.groups())
                found[executor, move, number] = path
        return found
