"""`slackwater.torch.Adaptive`: batch, accumulation and learning rate follow what training shows.

    adaptive = slackwater.torch.Adaptive(model, optimizer, dataset, batch=64, max_batch=1024)
    for epoch in adaptive.epochs(20):
        for images, labels in adaptive.batches():
            adaptive.backward(loss(model(images), labels))
            adaptive.step()
        scheduler.step()

Pollux's agent in a PyTorch program (Qiao, thesis, sections 3.3.1, 3.4.1, 3.4.3). `batches` yields a
replica's share of one backward pass after the other; how large it is, and after how many of them an
iteration is whole, changes between two iterations, without a restart. `step` does nothing until the
iteration is whole; then it scales the rate, steps, and clears the gradients. An epoch is a
statistical one: M * EFFICIENCY(M) examples' worth of progress add up to the data set's length, so
that a schedule of rates means the same whatever the batch.

It works alone, with DistributedDataParallel (also where aggregators add its gradients up), and with
`slackwater.torch.Optimizer`. Rank 0 decides, and tells the others every few iterations. In a job to
which the cluster gave GPUs it reports to the policy.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from slackwater.agent.adaptive_record import AdaptiveRecord
from slackwater.agent.fit_process import FitProcess
from slackwater.agent.goodput import fixed_by
from slackwater.agent.goodput_report import REPORT_S, ReportThread, check_period, reports_to
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.adaptive_batch import (
    FIT_S,
    AdaptiveBatch,
    AdaptiveChange,
    Decision,
)
from slackwater.common.domains.models.example_order import ExampleOrder
from slackwater.common.domains.models.goodput import BatchLimits
from slackwater.schemas.telemetry import GoodputReport
from slackwater.torch.gradient_noise import Halves, Lengths, ReplicaGradients, can_hook
from slackwater.torch.optimizer import Optimizer
from slackwater.torch.replicas import Replicas

EXCHANGE_EVERY: Final = 8
"""Iterations between two times that ranks agree, and that an iteration's noise is measured."""
SLOW_S: Final = 1.0
"""Iterations of more seconds are each followed by an agreement, whose cost is small beside them."""
MEASURED_FIRST: Final = 16
"""First iterations, whose noise is all measured."""
_OURS: Final = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class _Plan(NamedTuple):
    """One iteration, the same in all ranks."""

    number: int
    decision: Decision
    passes: tuple[int, ...]
    """Examples of each backward pass of a replica."""
    measured: bool


class Adaptive:
    """Made by every rank, after its process group and its wrapped model and optimiser."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        batch: int,
        max_batch: int,
        max_per_gpu: int | None = None,
        scale: str | None = None,
        warmup_epochs: float = 0.0,
        adapt: bool = True,
        seed: int = 0,
        record: str | Path | None = None,
        fit_s: float = FIT_S,
        report_s: float = REPORT_S,
        **loader: Any,
    ) -> None:
        """`batch`: examples of all replicas together that you would train with on one GPU (M0), by
        the optimiser's rate. `max_batch`: the most that still converges; `max_per_gpu`: that fit a
        device at once. `scale`: adascale (default), square-root (default with Adam), linear, legw
        with `warmup_epochs`, or a plug-in's name. `adapt`: False keeps M0, and measures. `seed`: of
        the order of examples. `record`: a file to which changes are appended, as JSON lines.
        `loader`: what torch's DataLoader takes beside the batch. Raises Rejected, and
        ConfigRejected for a `scale` that nobody offers."""
        _check(dataset, loader)
        check_period(report_s)
        self._model, self._optimizer, self._dataset = model, optimizer, dataset
        self._loader, self._replicas = loader, Replicas()
        limits = _limits(batch, max_batch, max_per_gpu or max_batch, adapt)
        self._core = AdaptiveBatch(
            limits, self._replicas.nodes, self._replicas.number,
            lr_rule=scale or _rule_for(optimizer), warmup_epochs=warmup_epochs, fit_s=fit_s,
        )  # fmt: skip
        self._lengths = Lengths(optimizer)
        self._halves = Halves(self._lengths)
        self._hooked = self._hook()
        self._folded = False
        """Aggregators tell of the workers' gradients (`Agent(noise=True)`), in place of halves."""
        self._order = ExampleOrder(len(dataset), seed)
        self.iteration = 0
        """Iterations that are done."""
        self.progress = 0.0
        """Statistical epochs that are done, fractions included."""
        self._examples = 0
        self._decision = self._core.decision()
        self._source: Iterator[Any] | None = None
        self._begun_s: float | None = None
        self._begin()
        self._cuda = any(p.device.type == "cuda" for p in model.parameters())
        self._fits = FitProcess()
        self._record: AdaptiveRecord | None = None
        self._report: GoodputReport | None = None
        self._target: float | None = None
        """Statistical epochs that the program trains for, as it said last."""
        self._reports: ReportThread | None = None
        if not self._replicas.rank:
            self._lead(record, report_s)

    def _hook(self) -> ReplicaGradients | None:
        """Return how replicas' gradients are measured; None: by halves, before they are averaged.
        Raises Rejected where neither can be."""
        model, number = self._model, self._replicas.number
        if isinstance(model, DistributedDataParallel):
            self._replicas.check(model.process_group)
            if number == 1:
                return None
            if not can_hook(model):
                raise Rejected(
                    "the model has a communication hook of its own, so that its replicas' noise "
                    "cannot be measured: leave the hook out"
                )
            return ReplicaGradients(self._lengths, model)
        if number > 1 and not isinstance(self._optimizer, Optimizer):
            raise Rejected(
                f"{number} replicas train a {type(model).__name__} and step by a "
                f"{type(self._optimizer).__name__}: wrap the model in DistributedDataParallel, or "
                "the optimiser in slackwater.torch.Optimizer"
            )
        return None

    def _lead(self, record: str | Path | None, report_s: float) -> None:
        """Begin what rank 0 does for all."""
        self._fits.start()
        if record is not None:
            self._record = AdaptiveRecord(record)
        job = self._replicas.job
        if (to := reports_to(job, self._replicas.rank)) is not None:
            self._reports = ReportThread(job, 0, to, report_s, self._told)

    def _told(self) -> GoodputReport | None:
        """Return the last fit's report with what is true now; called by the thread that sends."""
        report, decision = self._report, self._decision
        if report is None:
            return None
        return msgspec.structs.replace(
            report,
            per_gpu=decision.per_gpu,
            accumulation=decision.accumulation,
            rate_scale=decision.rate,
            progress_epochs=self.progress,
            target_epochs=self._target,
        )

    # The loops ------------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the statistical epochs that are left of so many, the interrupted one first. Raises
        Rejected if none of its batches was asked for."""
        self._target = float(total) if total > 0 else None
        while (number := self._epoch) < total:
            before = self.iteration
            yield number
            if self.iteration == before:
                raise Rejected(
                    f"epoch {number} went by without an iteration: loop over adaptive.batches() "
                    "and call adaptive.step() for each batch"
                )
        self.close()

    @property
    def _epoch(self) -> int:
        return int(self.progress + 1e-9)  # A sum of shares may miss the whole number.

    def batches(self) -> Iterator[Any]:
        """Yield batches until this statistical epoch is done: each is this replica's part of one
        backward pass, drawn from all passes over the data set in turn."""
        epoch = self._epoch
        while self._epoch == epoch:
            if self._source is None:
                loader = DataLoader(self._dataset, batch_sampler=self._draw(), **self._loader)
                self._source = iter(loader)
            if self._begun_s is None:
                self._begun_s = self._now_s()
            drawn = next(self._source)
            self._plan, self._pass = self._plans.popleft()
            if self._pass == 0:
                self._begin_iteration()
            if isinstance(self._model, DistributedDataParallel):
                self._model.require_backward_grad_sync = self.last_pass
            self._went_back = False
            yield drawn

    def _begin(self) -> None:
        """Draw from `_examples` on."""
        self._source = None
        self._plans: deque[tuple[_Plan, int]] = deque()
        self._ahead, self._planned = self._examples, self.iteration
        self._plan, self._pass, self._went_back = self._next_plan(), 0, False
        self._settled = 0
        self._rates: list[Any] = []
        self._exchange_at = self.iteration + EXCHANGE_EVERY
        self._last_s = 0.0
        self._begun_s, self._aside_s = None, 0.0
        """Seconds of this iteration in which noise was measured."""

    def _draw(self) -> Iterator[list[int]]:
        """Yield the examples of each backward pass for ever; loaders may draw ahead."""
        replicas = self._replicas
        while True:
            plan = self._next_plan()
            shares = self._order.share(self._ahead, replicas.rank, replicas.number, plan.passes)
            self._ahead += sum(plan.passes) * replicas.number
            self._planned += 1
            for number, share in enumerate(shares):
                self._plans.append((plan, number))
                yield share

    def _next_plan(self) -> _Plan:
        number, decision = self._planned, self._decision
        measured = number < MEASURED_FIRST or number % EXCHANGE_EVERY == 0
        passes = decision.accumulation + 1
        each = decision.per_gpu
        if measured and self._hooked is None and not self._folded:
            own = passes * each
            measured = own > 1
            if measured:  # Two halves of equal numbers of passes.
                passes += passes % 2
                each = own // passes
        return _Plan(number, decision, (each,) * passes, measured)

    def _begin_iteration(self) -> None:
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.backward_passes_per_step = len(self._plan.passes)
        if self._plan.measured and self._hooked is not None:
            self._hooked.arm()

    # An iteration ---------------------------------------------------------------------------------

    @property
    def last_pass(self) -> bool:
        """Whether this batch completes an iteration: clip gradients after its backward alone."""
        return self._pass == len(self._plan.passes) - 1

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss that is a mean over the batch. Raises Rejected if called
        twice for a batch."""
        if self._went_back:
            raise Rejected(
                "adaptive.backward was called before: call it once for each batch, with the sum of "
                "what there is to minimise"
            )
        passes = len(self._plan.passes)
        if self.last_pass:
            self._scale_rates()
        (loss / passes if passes > 1 else loss).backward()
        self._went_back = True
        if self._plan.measured:
            begun_s = time.perf_counter()
            self._measure(passes)
            self._aside_s += time.perf_counter() - begun_s

    def _measure(self, passes: int) -> None:
        halved = self._hooked is None and passes % 2 == 0 and not self._folded
        if halved and self._pass + 1 == passes // 2:
            self._halves.half()
        if not self.last_pass or not (halved or self._hooked):
            return
        own = sum(self._plan.passes)
        if self._hooked is not None:
            found = self._hooked.whole(own, self._replicas.mean, self._replicas.number)
        else:
            found = self._halves.whole(own)
        self._core.saw_squares(*found)

    def _scale_rates(self) -> None:
        """The scheduler's rates are those of M0; they are back once the step is done."""
        groups = self._optimizer.param_groups
        self._rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self._plan.decision.rate

    def step(self) -> bool:
        """Step the optimiser if the iteration is whole, and say whether it is. Raises Rejected for
        a batch without `adaptive.backward`."""
        if not self._went_back:
            raise Rejected(
                "adaptive.step came without adaptive.backward(loss): call that in place of "
                "loss.backward(), so that gradients of several passes are weighed"
            )
        if not self.last_pass:
            return False
        try:
            self._optimizer.step()
        finally:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
        self._optimizer.zero_grad()
        if self._plan.measured and isinstance(self._optimizer, Optimizer):
            self._ask_aggregators(self._optimizer)
        self._done()
        return True

    def _ask_aggregators(self, optimizer: Optimizer) -> None:
        """Take the workers' gradients of the step just made, if the job's regions keep them: known
        from Adam's second step on, or never."""
        if not self._folded and self.iteration >= MEASURED_FIRST:
            return
        optimizer.synchronize()
        found = optimizer.agent.gradient_squares(optimizer.iteration)
        if found is not None:
            own = sum(self._plan.passes)
            self._core.saw_squares(found.each_sq, found.mean_sq, own, own * found.workers)
            self._folded = True

    def _done(self) -> None:
        plan, number = self._plan, self._replicas.number
        examples = sum(plan.passes) * number
        self._examples += examples
        self.progress += examples * plan.decision.efficiency / len(self._dataset)
        self.iteration = plan.number + 1
        self._time()
        if self.iteration >= self._exchange_at:
            self._exchange()

    def _time(self) -> None:
        """Tell the core how long this iteration took; replicas' measured ones take longer."""
        begun_s, aside_s, plan = self._begun_s, self._aside_s, self._plan
        now_s = self._now_s()
        self._begun_s, self._aside_s = None, 0.0
        self._settled += 1
        if begun_s is None or now_s is None or (plan.measured and self._hooked is not None):
            return
        self._last_s = now_s - begun_s - aside_s
        if self._settled > 1:  # The first one also starts workers, allocates and compiles.
            self._core.saw_iteration(
                plan.passes[0], len(plan.passes) - 1, now_s - begun_s - aside_s
            )

    def _now_s(self) -> float | None:
        """Return the time; on a GPU only every few iterations, as it has to wait for the device."""
        if self._cuda:
            if self.iteration % EXCHANGE_EVERY not in (2, 3):
                return None
            torch.cuda.synchronize()
        return time.perf_counter()

    def _exchange(self) -> None:
        """Fit and re-tune if it is time; then all ranks train as rank 0 says."""
        core, before, theta = self._core, self._decision, None
        if not self._replicas.rank:
            if not self._fits.waits and (wanted := core.due_fit(time.monotonic())) is not None:
                self._fits.ask(wanted)
            theta = self._fits.answer()
            if theta is not None:
                core.fitted(theta)
                if self._reports is not None:
                    self._reports.check()
                    self._report = core.agent.report(self._replicas.job, self._replicas.attempt)
        every = EXCHANGE_EVERY if self._last_s < SLOW_S else 1
        self._decision, every = self._replicas.agree(core.decision(self.progress), every)
        self._exchange_at = self.iteration + every
        if self._record is not None and (
            theta is not None
            or self.iteration == EXCHANGE_EVERY
            or before[:2] != self._decision[:2]
        ):
            self._record.append(self._change())

    def _change(self) -> AdaptiveChange:
        core, now_s = self._core, LiveClock().now_s()
        return AdaptiveChange(
            now_s, self.iteration, self.progress, self.batch, *self._decision,
            core.noise_scale, *core.noise_interval, core.goodput(),
        )  # fmt: skip

    # Reading, keeping -----------------------------------------------------------------------------

    @property
    def decision(self) -> Decision:
        """(m, s), the rate's factor and EFFICIENCY of the iterations that are planned now."""
        return self._decision

    @property
    def batch(self) -> int:
        """M: examples of an iteration, of all replicas."""
        return self._decision.batch(self._replicas.number)

    @property
    def noise_scale(self) -> float | None:
        """phi, in rank 0; None: unknown so far."""
        return self._core.noise_scale

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, and the place in the data: `slackwater.torch.checkpoint` takes it."""
        return {
            "iteration": self.iteration,
            "progress": self.progress,
            "examples": self._examples,
            "seed": self._order.seed,
            "core": self._core.remember(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with as many replicas as there are now. Raises Rejected."""
        self._core.recall(state["core"])
        self.iteration, self.progress = state["iteration"], state["progress"]
        self._examples = state["examples"]
        self._order = ExampleOrder(len(self._dataset), state["seed"])
        self._decision = self._core.decision(self.progress)
        self._begin()

    def close(self) -> None:
        """End what runs beside the training; `epochs` calls it at its end. Idempotent."""
        self._fits.close()
        if self._record is not None:
            self._record.append(self._change())
            self._record = None
        if self._reports is not None:
            self._reports.close()
            self._reports = None


def _rule_for(optimizer: torch.optim.Optimizer) -> str:
    """AdaScale is SGD's; Adam and its like go by the square root (thesis, section 3.3)."""
    return "square-root" if "betas" in optimizer.param_groups[0] else "adascale"


def _limits(batch: int, max_batch: int, max_per_gpu: int, adapt: bool) -> BatchLimits:
    """Return the bounds of the batch, as its program and its job's submission have them. Raises
    Rejected."""
    limits = BatchLimits(
        initial=batch, total_max=max_batch, per_gpu_max=max_per_gpu, fixed=None if adapt else batch
    )
    return fixed_by(os.environ, limits)


def _check(dataset: Any, loader: dict[str, Any]) -> None:
    taken = [name for name in _OURS if name in loader]
    if taken:
        raise Rejected(
            f"{taken[0]}={loader[taken[0]]!r} is not for an adaptive loader, which chooses the "
            "batches itself: give batch and max_batch"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise Rejected(
            f"the data set is a {type(dataset).__name__}, without a length or an order: give one "
            "with __len__ and __getitem__"
        )
