"""`slackwater.torch.Elastic`: training whose bits do not depend on how many processes there are.

    elastic = slackwater.torch.Elastic(optimizer, model, virtual_ranks=4, seed=1)
    for iteration in elastic.iterations(1000):
        for rank in elastic.ranks():
            some = elastic.indices(len(images), 32)
            loss(model(images[some]), labels[some]).backward()
        elastic.step()

Each iteration is the mean of `virtual_ranks` gradients, folded in virtual order, computed by 1 to
that many processes, each its part of them, one after another. A virtual rank's random generators
and its place in the data are functions of the seed, the virtual rank and the iteration, so nothing
is lost with a process: a run that was resized, paused, moved and killed ends at the bits of one
that was not (Qiao's thesis, section 6.3). A journal says what happened when, and a replay in one
process follows it.
"""

import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import numpy as np
import torch

from slackwater.agent.journal import (
    FILE,
    REPLAY,
    REPLAYED,
    Entry,
    Journal,
    What,
    assignment,
    default_folder,
    digest_of,
    first_what,
    last_run,
    unlike,
)
from slackwater.agent.local import JOB as LOCAL
from slackwater.agent.virtual_agent import VirtualAgent
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.virtual import seed_of
from slackwater.torch.optimizer import Optimizer
from slackwater.torch.tensors import Trained

_SAMPLES: Final = -1
"""Stands in seeds where a virtual rank is not concerned."""


class Elastic(Optimizer):
    """Wraps `optimizer` and `model` as Optimizer does."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        virtual_ranks: int,
        seed: int = 0,
        threads: int = 1,
        folder: str | Path | None = None,
        backward_passes_per_step: int = 1,
        **options: Any,
    ) -> None:
        """Returns as Optimizer does. `virtual_ranks`: gradients of an iteration, at least as many
        as the job may have workers. `seed`: for all that virtual ranks draw. `threads`: torch's,
        in each process: sums depend on their number. `folder`: where the journal is kept; by
        default SLACKWATER_CHECKPOINT, else checkpoints/JOB. `backward_passes_per_step`: of each
        virtual rank. `options`: Optimizer's. Raises Rejected, for buffers that training changes
        too, and as Agent does."""
        _refuse_statistics(model)
        torch.set_num_threads(threads)
        self._seed, self._virtual_ranks = seed, virtual_ranks
        self._model, self._buffers = model, _versions(model)
        self._workers = 1
        self._open: int | None = None
        self._left: list[int] = []
        self._examples = self._micro_batch = 0
        self._orders: dict[int, torch.Tensor] = {}
        super().__init__(
            optimizer, model, backward_passes_per_step=backward_passes_per_step, **options
        )
        self._chronicle = _Chronicle(self, folder)

    def _make_agent(self, **options: Any) -> VirtualAgent:
        return VirtualAgent(virtual_ranks=self._virtual_ranks, **options)

    @property
    def agent(self) -> VirtualAgent:
        return cast(VirtualAgent, self._agent)

    # The loops ------------------------------------------------------------------------------------

    def iterations(self, total: int, scheduler: Any = None) -> Iterator[int]:
        """Yield the iterations that are left of so many, from 0 on. `scheduler`: a fresh one of
        torch's, stepped once for each iteration that has been applied, whoever applied it."""
        if scheduler is not None:
            for _ in range(self._iteration):
                scheduler.step()
        while (iteration := self._iteration) < total:
            yield iteration
            if self._iteration != iteration + 1:
                raise Rejected(f"iteration {iteration}: call step() once before the next one")
            if scheduler is not None:
                scheduler.step()
        self.synchronize()

    def ranks(self) -> Iterator[int]:
        """Begin an iteration: yield the virtual ranks that this process computes, each with its
        random generators and without gradients. It may be none, of a process that has just joined
        or is about to leave."""
        if not self._joined:
            raise Rejected("the optimiser is closed: its job goes on without this worker")
        if self._left or self._open is not None:
            raise Rejected(f"iteration {self._iteration}: ranks() was begun and not all was done")
        self._wait_for(self._all[:1])  # Modules wait for the others before their forward.
        self._left = list(self.agent.begin(self._iteration + 1))
        self._workers = self.agent.crew(self._iteration + 1)
        while self._left:
            self._open = self._left[0]
            for tensor in self._all:
                tensor.parameter.grad = None
            seed_generators(seed_of(self._seed, self._open, self._iteration))
            self._micro_batch = 0
            yield self._open
            if len(self._left) > 1:  # For the last one, step() does it.
                self._end_rank()
            self._left.pop(0)

    def _end_rank(self) -> None:
        self._check()
        for tensor in self._all:
            if not tensor.pushed:
                self._push(tensor)
            tensor.forget_gradient()

    def _accumulated(self, tensor: Trained) -> None:
        if self._open is None:
            raise Rejected(
                f"{tensor.name}: a backward pass that belongs to no virtual rank; put it into "
                "`for rank in elastic.ranks():`"
            )
        super()._accumulated(tensor)

    def step(self, closure: Any = None) -> Any:
        """All gradients of this process's virtual ranks are there. Raises Rejected where they are
        not, or where a buffer of the model was changed."""
        if closure is not None:
            raise Rejected("step() takes no closure: each virtual rank has its own backward pass")
        if self._left:
            raise Rejected(
                f"iteration {self._iteration}: virtual ranks {self._left} are not computed; let "
                "`for rank in elastic.ranks():` run to its end"
            )
        self.synchronize()  # Includes parameters that neither pass came by.
        self._chronicle.look()
        if self._open is None:  # Others compute this iteration.
            self.agent.skip()
            self._iteration += 1
            for tensor in self._all:
                tensor.stale = True
            return None
        super().step()
        self._open = None
        return None

    def _check(self) -> None:
        super()._check()
        if (now := _versions(self._model)) != self._buffers:
            name = next(iter(dict(now.items() ^ self._buffers.items())))
            raise Rejected(
                f"buffer {name} was changed in training: it would be another one in each process; "
                "use layers without running statistics"
            )

    # Data -----------------------------------------------------------------------------------------

    def indices(self, length: int, examples: int) -> torch.Tensor:
        """Return which of `length` examples this virtual rank's next micro-batch of `examples` has:
        a 1-d int64 tensor. Each epoch has an order of its own, drawn from the seed; its end and the
        next one's begin share a batch. The place in it is a function of virtual rank and iteration.
        Raises Rejected for another number of examples than before."""
        if self._open is None:
            raise Rejected("indices() belongs to a virtual rank: call it in elastic.ranks()")
        if self._examples and examples != self._examples:
            raise Rejected(
                f"{examples} examples, {self._examples} before: places in the data follow from a "
                "batch that stays as it is; give one number"
            )
        self._examples = examples
        number = self._iteration * self._virtual_ranks + self._open
        first = (number * self._passes_per_step + self._micro_batch) * examples
        self._micro_batch += 1
        epochs = range(first // length, (first + examples - 1) // length + 1)
        order = torch.cat([self._order(epoch, length) for epoch in epochs])
        begin = first - epochs[0] * length
        return order[begin : begin + examples]

    def _order(self, epoch: int, length: int) -> torch.Tensor:
        known = self._orders.get(epoch)
        if known is None or len(known) != length:
            for old in [each for each in self._orders if each < epoch - 1]:
                del self._orders[old]
            generator = torch.Generator().manual_seed(seed_of(self._seed, _SAMPLES, epoch))
            known = self._orders[epoch] = torch.randperm(length, generator=generator)
        return known

    # The end --------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Wait for the last step; return the digest of all parameters, as the journal has it."""
        self.synchronize()
        return self._digest()

    def _digest(self) -> str:
        return digest_of(self.agent.confirmed())

    def entry(self, what: What, *, digest: bool = True) -> Entry:
        """Describe this moment for the journal: the iteration that is being computed."""
        return Entry(
            iteration=self._iteration,
            what=what,
            workers=self._workers,
            assignment=assignment(self._virtual_ranks, self._workers),
            virtual_ranks=self._virtual_ranks,
            seed=self._seed,
            m=self._examples,
            s=self._passes_per_step,
            rate=float(self.param_groups[0]["lr"]),
            rank=self._agent.rank,
            attempt=self.agent.attempt,
            node=socket.gethostname(),
            digest=self._digest() if digest else "",
        )

    def close(self, result: Any = None) -> None:
        """End as Optimizer does; rank 0 writes the last line of the journal, or checks it."""
        if self._joined:
            self.synchronize()
            self._chronicle.close()
        super().close(result)


class _Chronicle:
    """The journal as rank 0 writes it, or as a replay follows it."""

    def __init__(self, elastic: Elastic, folder: str | Path | None) -> None:
        self._elastic, agent = elastic, elastic.agent
        followed = os.environ.get(REPLAY) if agent.job == LOCAL else None
        self._expected = last_run(Journal(Path(followed)).entries()) if followed else None
        self._checked = 0
        self._journal: Journal | None = None
        if agent.job != LOCAL or (folder is not None and not followed):
            self._journal = Journal(Path(folder or default_folder(agent.job)) / FILE)
        self._last: tuple[int, ...] = ()
        self._before: Any = None

    def look(self) -> None:
        """Write what has changed since the iteration before; follow what is written."""
        elastic, agent = self._elastic, self._elastic.agent
        self._follow()
        if self._journal is None:
            return
        now = (elastic._workers, agent.places, elastic._examples)
        before, self._last = self._last, now
        if not before:
            self._begin(self._journal)
        elif agent.rank == 0 and now != before:
            names: tuple[What, ...] = ("resize", "move", "batch")
            for what, was, is_now in zip(names, before, now, strict=True):
                if was != is_now:
                    self._journal.append(elastic.entry(what))

    def _begin(self, journal: Journal) -> None:
        elastic, agent = self._elastic, self._elastic.agent
        if agent.rank == 0:
            what = first_what(journal.entries(), elastic.iteration, socket.gethostname())
            journal.append(elastic.entry(what))
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        elif elastic.iteration and not agent.joined_late and agent.restarted:
            journal.append(elastic.entry("recovery"))

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        assert self._journal is not None
        self._journal.append(self._elastic.entry("pause", digest=False))
        signal.signal(number, self._before)
        os.kill(os.getpid(), number)

    def _follow(self) -> None:
        """Raises Rejected where this run is not the journal's."""
        elastic = self._elastic
        for expected in self._expected or ():
            if expected.iteration != elastic.iteration or expected.what == "pause":
                continue
            if wrong := unlike(expected, elastic.entry(expected.what)):
                raise Rejected(f"replay, iteration {elastic.iteration} ({expected.what}): {wrong}")
            self._checked += 1

    def close(self) -> None:
        """Write or check the end."""
        elastic = self._elastic
        if self._journal is not None and elastic.agent.rank == 0:
            elastic._workers = elastic.agent.workers
            known = [] if self._last else self._journal.entries()[-1:]
            if not (known and known[0].what == "end"):  # Else it was stopped after its end.
                self._journal.append(elastic.entry("end"))
        if self._expected is not None:
            self._follow()
            places = sum(each.what != "pause" for each in self._expected)
            sys.stdout.write(
                f"{REPLAYED} in {self._checked} of {places} places, to iteration "
                f"{elastic.iteration}, digest {elastic.digest()}\n"
            )
            sys.stdout.flush()


def seed_generators(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators, of 64 bits."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _versions(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Return which tensor each buffer is, and how often it was written to."""
    return {name: (id(each), each._version) for name, each in model.named_buffers()}


def _refuse_statistics(model: torch.nn.Module) -> None:
    """Raises Rejected."""
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise Rejected(
                f"{name or 'the model'} ({type(module).__name__}) has running statistics, which "
                "follow from all batches that one process has seen; give it "
                "track_running_stats=False, or use GroupNorm or LayerNorm"
            )
