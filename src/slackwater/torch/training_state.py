"""`slackwater.torch.checkpoint`: a plain PyTorch script that can be stopped at any time.

    state = slackwater.torch.checkpoint(model=model, optimizer=optimizer)
    for epoch in state.epochs(90):
        for images, labels in state.batches(loader):
            ...

or, for a script that counts iterations, `for step in state.steps(10_000):`. The first line finds
the newest whole checkpoint and puts everything back; the loops begin where that was taken. They are
loops, and not a call at the end of each iteration alone, because a script that is started again has
to begin elsewhere: a call that only saves leaves that to the script, which then trains on the first
batches twice. A script with a loop of its own shape calls `state.step()` after each iteration, and
reads `state.iteration`.

While training goes on, the state is copied aside at most every `interval_s`, to memory that was
touched before, and written behind by a thread of idle disk priority: training waits for the copy
alone. On SIGTERM the ranks agree on the iteration after which all of them save and end, with exit
code 75 and without the interpreter's teardown, which takes torch seconds.

Every rank of a torch.distributed job makes one, after init_process_group. Rank 0 writes what all
have in common, each its own generators; with `sharded` each rank writes all that it has.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from slackwater.agent.identity import JOB, plainly, rank_of, workers_of
from slackwater.common.base.checkpoint_folder import TORCH, CheckpointFolder, Part
from slackwater.common.base.errors import Rejected
from slackwater.common.base.file_lock import FileLock
from slackwater.common.native.disk_priority import yield_the_disk
from slackwater.schemas.jobs import CHECKPOINT_VARIABLE
from slackwater.torch.gradients import GradientOptimizer
from slackwater.torch.optimizer import Optimizer
from slackwater.torch.positions import (
    epoch_state,
    random_states,
    resumed,
    set_random_states,
)
from slackwater.torch.staging import Staging, mapped, state_bytes

PAUSED: Final = 75
"""Exit code of a program that saved its state and ended because it was told to: it is to be started
again, and neither done nor failed (sysexits.h: EX_TEMPFAIL)."""
INTERVAL_S: Final = 60.0
_LOCK_S: Final = 10.0
"""Seconds to wait for children of a killed process, which hold its lock a little longer."""
_SAVE, _STOP = 1, 2


def checkpoint(
    *,
    folder: str | Path | None = None,
    interval_s: float = INTERVAL_S,
    sharded: bool = False,
    **parts: Any,
) -> "TrainingState":
    """Restore `parts` from the newest whole checkpoint, if there is one, and keep saving them.

    `parts`: whatever has state_dict and load_state_dict, under names that stay the same: model,
    optimizer, scheduler, scaler. `folder`: by default SLACKWATER_CHECKPOINT (`slackwater submit
    --checkpoint`), else checkpoints/JOB, or checkpoints/SCRIPT, below the present folder; ranks on
    several nodes need one that all of them see. `interval_s`: seconds between two saves, and so the
    most work that a kill loses. Call it from the main thread. Raises Rejected."""
    return TrainingState(folder, interval_s, sharded, parts)


class TrainingState:
    """Made by `checkpoint`. `iteration` and `epoch` count from 0 what is done."""

    def __init__(
        self, folder: str | Path | None, interval_s: float, sharded: bool, parts: dict[str, Any]
    ) -> None:
        _check(parts, interval_s)
        self._parts, self._interval_s, self._sharded = parts, interval_s, sharded
        self._ranks = _Ranks()
        self._folder = CheckpointFolder(Path(folder or _default_folder()))
        self._lock = _locked(self._folder.path, self._ranks.rank)
        self.iteration = self.epoch = self._position = 0
        self._begun: dict[str, Any] | None = None
        """The generators at the beginning of an epoch of which batches were used."""
        self._random: dict[str, Any] | None = None
        """The generators at the checkpoint, until they are set."""
        self._used_up = False
        self._staging = Staging()
        self._writer = ThreadPoolExecutor(1, "checkpoint", yield_the_disk)
        self._writing: Future[None] | None = None
        """The last save; None: its place is not made yet."""
        self._told = self._asked = False
        self._restore()
        self._saved, self._saved_s = self.iteration, time.monotonic()
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    # The loops ------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Yield the iterations that are left of so many; each is done when the next one is asked
        for. The last one's state is saved before this ends."""
        self._set_random()
        while self.iteration < total:
            yield self.iteration
            self.step()
        self.close()

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left of so many, the one that was interrupted first. The end's
        state is saved before this ends."""
        self._set_random(keep=True)
        while self.epoch < total:
            yield self.epoch
            self._next_epoch()
        self.close()

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches that are left of this epoch; each is an iteration, done when the next
        one is asked for. Tells a DistributedSampler the epoch. In the processes of a DataLoader
        with workers, random augmentation begins anew."""
        if self._used_up:
            self._next_epoch()
        if (set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        if self._position and self._begun is not None:
            source = resumed(loader, self._begun, self._position, self._set_random)
        else:
            self._set_random()
            self._begun, source = epoch_state(loader), iter(loader)
        for batch in source:
            yield batch
            self._position += 1
            self.step()
        self._used_up = True

    def _next_epoch(self) -> None:
        self.epoch, self._position, self._begun, self._used_up = self.epoch + 1, 0, None, False

    def step(self) -> None:
        """Say that an iteration is done, in a loop of the program's own. Saves if it is time; does
        not return if the program was told to end."""
        self.iteration += 1
        if self._writing is None:  # The optimiser has its state by now: its size is known.
            nbytes, on_gpu = state_bytes(self._state()), torch.cuda.is_initialized()
            self._writing = self._writer.submit(self._staging.fit, nbytes, on_gpu)
        due = time.monotonic() - self._saved_s >= self._interval_s and self._writing.done()
        wish = (
            _STOP if self._told else _SAVE if due and not (self._asked or self._ranks.rank) else 0
        )
        self._asked |= wish == _SAVE
        agreed = self._ranks.agreed(wish)
        if agreed == _STOP:
            self._end()
        elif agreed == _SAVE:
            self.save()

    # Saving ---------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """Copy the state aside and have it written behind; `wait`: return once it is durable. All
        ranks of a job call it after the same iteration."""
        self._written()
        staged = self._staging.copy(self._state())
        self._saved, self._saved_s, self._asked = self.iteration, time.monotonic(), False
        self._writing = self._writer.submit(self._write, self.iteration, staged)
        if wait:
            self._written()

    def close(self) -> None:
        """Save what is not saved yet, wait until it is durable, and let SIGTERM do again what it
        did before. The loops call it at their end."""
        self._ranks.agreed(0, last=True)
        if self.iteration > self._saved:
            self.save()
        self._written()
        signal.signal(signal.SIGTERM, self._before)

    def _state(self) -> dict[str, Any]:
        own = {
            "iteration": self.iteration,
            "epoch": self.epoch,
            "position": self._position,
            "begun": self._begun,
            "random": random_states(),
            "sharded": self._sharded,
        }
        if self._sharded or not self._ranks.rank:
            own["parts"] = {name: part.state_dict() for name, part in self._parts.items()}
        return own

    def _write(self, iteration: int, state: dict[str, Any]) -> None:
        def fill(path: Path) -> None:
            torch.save(state, path)
            try:  # A file that could not be read back must not replace one that can.
                _load(path)
            except torch.serialization.pickle.UnpicklingError as error:
                raise Rejected(
                    f"the state of {', '.join(self._parts)} has more than tensors, numbers and "
                    f"text, and could not be given back: {error}"
                ) from error

        rank, ranks = self._ranks.rank, self._ranks.number
        self._folder.write(iteration, rank, ranks, TORCH, fill)
        if not rank:
            self._folder.prune()

    def _written(self) -> None:
        """Wait for the last save. Training goes on without one that failed, and says so."""
        try:
            if self._writing is not None:
                self._writing.result()
        except OSError as error:
            _say(f"a checkpoint in {self._folder.path} failed: {error}; the one before stays")

    def _end(self) -> NoReturn:
        """Save what the program has now, itself: it does nothing else any more."""
        try:
            if self.iteration > self._saved:
                self._write(self.iteration, self._state())
            elif self._writing is not None:
                self._writing.result()
        except OSError as error:
            _say(f"told to end, and cannot save in {self._folder.path}: {error}")
            _exit(1)
        _say(f"saved at iteration {self.iteration} in {self._folder.path}; ends as it was told to")
        _exit(PAUSED)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Remember it until the iteration is done. Children that were forked ignore it: they end
        with their parent."""
        self._told = True

    # Restoring ------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Take the newest set that every rank finds whole. Raises Rejected."""
        folder, ranks = self._folder, self._ranks
        taken = -1
        for parts in ranks.same(folder.sets() if not ranks.rank else None):
            mine = parts[ranks.rank] if ranks.rank < len(parts) else None
            if not all(ranks.all((folder.path / parts[0].file).exists())):
                raise plainly(
                    f"not all ranks see {folder.path / parts[0].file}: ranks on several nodes need "
                    "a folder that all nodes have; name it by `slackwater submit --checkpoint`"
                )
            damage = next((why for why in ranks.all(mine and folder.damage(mine)) if why), "")
            if not damage:
                self._take(parts, mine)
                taken = self.iteration
                break
            if not ranks.rank:
                _say(f"the checkpoint of iteration {parts[0].iteration} is skipped: {damage}")
        for missing in folder.unfinished(taken) if not ranks.rank else ():
            _say(f"the checkpoint of iteration {missing} in {folder.path} was not finished")
        ranks.all(None)  # Everybody has looked.
        folder.clear(ranks.rank, taken)

    def _take(self, parts: tuple[Part, ...], mine: Part | None) -> None:
        ranks, before = self._ranks.number, len(parts)
        first = _load(self._folder.path / parts[0].file)
        if first["sharded"] != self._sharded or (self._sharded and before != ranks):
            kind = "sharded" if first["sharded"] else "not sharded"
            raise plainly(
                f"the checkpoint in {self._folder.path} is of {before} ranks and {kind}; this "
                f"program has {ranks}: start it as it was, or name another folder"
            )
        own = first if mine in (None, parts[0]) else _load(self._folder.path / mine.file)
        saved = own["parts"] if self._sharded else first["parts"]
        if set(saved) != set(self._parts):
            raise plainly(
                f"the checkpoint in {self._folder.path} has {', '.join(sorted(saved))}, this "
                f"program gives {', '.join(sorted(self._parts))}: give the same, or another folder"
            )
        for name, part in self._parts.items():
            # A model copies what it is given, an optimiser keeps it: not the file's pages, please.
            keeps = not isinstance(part, torch.nn.Module)
            state = mapped(saved[name], torch.Tensor.clone) if keeps else saved[name]
            part.load_state_dict(state)
        self.iteration, self.epoch = first["iteration"], first["epoch"]
        self._position = first["position"] * before // ranks
        if mine is not None:  # A rank that there was not before begins its own.
            self._begun = mapped(own["begun"], torch.Tensor.clone)
            self._random = mapped(own["random"], torch.Tensor.clone)
        self._set_random(keep=True)
        if not self._ranks.rank:
            _say(f"goes on at iteration {self.iteration}, from {self._folder.path}")

    def _set_random(self, keep: bool = False) -> None:
        """Set the generators as they were at the checkpoint, once; `keep`: and once more, since the
        program may draw before its loop begins."""
        if self._random is not None:
            set_random_states(self._random)
        if not keep:
            self._random = None


class _Ranks:
    """All ranks of the job, which decide together; alone without torch.distributed."""

    def __init__(self) -> None:
        """Raises Rejected."""
        self.rank, self.number = 0, 1
        self._wishes: tuple[Any, torch.Tensor] | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.number = dist.get_rank(), dist.get_world_size()
        elif workers_of() > 1:
            raise plainly(
                f"rank {rank_of()} of {workers_of()} makes a checkpoint before "
                "torch.distributed.init_process_group(): call that first"
            )
        # Not the group that trains: NCCL's would wait for the GPU.
        self._group = dist.new_group(backend="gloo") if self.number > 1 else None

    def agreed(self, wish: int, last: bool = False) -> int:
        """Return the largest wish of all ranks: alone of now, else of the iteration before, so that
        nobody waits for a message. `last`: nobody will ask again."""
        if self._group is None:
            return wish
        agreed = 0
        if self._wishes is not None:
            self._wishes[0].wait()
            agreed = int(self._wishes[1])
            self._wishes = None
        if not last:
            wishes = torch.tensor(wish)
            work = dist.all_reduce(wishes, dist.ReduceOp.MAX, self._group, async_op=True)
            self._wishes = work, wishes
        return agreed

    def same(self, value: Any) -> Any:
        """Return rank 0's value in all ranks."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, self._group)
        return box[0]

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self._group is None:
            return [value]
        found = [None] * self.number
        dist.all_gather_object(found, value, self._group)
        return found


def _check(parts: dict[str, Any], interval_s: float) -> None:
    if interval_s < 0:
        raise Rejected(f"interval_s is {interval_s:g}: give seconds, at least 0")
    if not parts:
        raise Rejected("nothing to save: give model=model, optimizer=optimizer")
    for name, part in parts.items():
        if isinstance(part, Optimizer) and not isinstance(part, GradientOptimizer):
            raise Rejected(
                f"{name} is a slackwater.torch.Optimizer, whose state is with the aggregators: its "
                "job goes on without a checkpoint, leave it out"
            )
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise Rejected(
                f"{name} is a {type(part).__name__}, without state_dict and load_state_dict: give "
                "models, optimisers and the like"
            )


def _default_folder() -> Path:
    if given := os.environ.get(CHECKPOINT_VARIABLE):
        return Path(given)
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "interactive"
    return Path("checkpoints") / (os.environ.get(JOB) or Path(script).stem)


def _locked(folder: Path, rank: int) -> FileLock:
    """Lock the folder for this rank. Raises Rejected where another process has it."""
    lock = FileLock(folder / f".rank{rank}.lock")
    until_s = time.monotonic() + _LOCK_S
    while holder := lock.take():
        if time.monotonic() > until_s:
            raise plainly(
                f"process {holder} keeps its checkpoints in {folder}, too, as rank {rank}: give "
                "each job a folder of its own, by folder= or `slackwater submit --checkpoint`"
            )
        time.sleep(0.05)
    return lock


def _load(path: Path) -> Any:
    return torch.load(path, mmap=True, weights_only=True, map_location="cpu")


def _say(text: str) -> None:
    sys.stderr.write(f"slackwater: {text}\n")


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
