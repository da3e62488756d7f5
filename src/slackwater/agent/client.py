"""`slackwater.Agent`: what a training program uses (Gu et al. 2021, section 4: Push and Pull).

    with Agent(job="digits", rank=0, workers=2, tensors={"w": w, "b": b}) as agent:
        for batch in batches:
            parameters = agent.step(gradients(batch))

An iteration's update is applied once, when all workers' gradients are in. `push` copies one
tensor's gradient into its slot; when the last tensor of a bucket is there, the bucket's aggregator
is told. `pull` and `wait` return once the update has been applied. Over shared memory a pull copies
nothing: the view it returns is the master copy, and stays valid until this worker has pushed that
tensor twice more. Not for use by several threads at once.

An iteration, as it is measured and reported, is the time between two successive instants at which
the program had waited for all of the job's tensors.
"""

import atexit
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from slackwater.agent.address_choice import forced_transport
from slackwater.agent.attachment import Array
from slackwater.agent.divided_tensor import Divided, divided_tensors
from slackwater.agent.exit_hook import at_exit
from slackwater.agent.gradient_sums import add_squares
from slackwater.agent.identity import identify, plainly, tell_how_to_submit, way, write_result
from slackwater.agent.initial import Initial
from slackwater.agent.local import JOB as LOCAL
from slackwater.agent.local import Local
from slackwater.agent.on_device import arrived
from slackwater.agent.optimizer_state import TensorState, read_states
from slackwater.agent.push_hyper import left_to_give
from slackwater.agent.session import Session
from slackwater.agent.snapshot import reads_of
from slackwater.agent.worker_bucket import (
    TableKind,
    WorkerBucket,
    check_gradient,
    read_tensors,
    unfit,
)
from slackwater.common.base import limits
from slackwater.common.base.errors import GradientRefused, Rejected
from slackwater.common.bus.access import Credentials
from slackwater.common.domains.models.gradient_noise import GradientSquares
from slackwater.common.domains.slots.rules import Floats
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.gpu import copy_into
from slackwater.schemas.jobs import Consistency, JobSpec
from slackwater.schemas.tensors import DType, UpdateRule


class Agent:
    """One worker of one job. What is not given is taken from the environment, where the worker
    service puts it: SLACKWATER_JOB, _RANK, _WORKERS, _TOKEN_FD, _TRANSPORT; or _URL, NATS_USER.
    Without a job, here or there, the program trains alone, by the same rules (local.py)."""

    _virtual_ranks = 0  # VirtualAgent has some.
    _tables: Mapping[str, TableKind] = MappingProxyType({})  # TableAgent has some.

    def __init__(
        self,
        *,
        tensors: Mapping[str, Any],
        job: str | None = None,
        rank: int | None = None,
        workers: int | None = None,
        servers: int = 1,
        update: UpdateRule | None = None,
        gradient_dtype: DType = "float32",
        consistency: Consistency | None = None,
        staleness: int | None = None,
        groups: Mapping[str, int] | None = None,
        url: str | None = None,
        credentials: Credentials | None = None,
        transport: str | None = None,
        device: str = "",
        total_momentum: bool = False,
        deadline_s: float = limits.AGENT_WAIT_S,
        open_s: float = 0.0,
        model: str = "",
        iterations: int = 1,
        fractional_share: bool = False,
        noise: bool = False,
    ) -> None:
        """Returns when the parameters can be pulled. `tensors` maps each name to initial values
        (float32), or to a shape, which means zeros; rank 0's are the job's. `transport`: insist on
        "shm" or "tcp"; "auto": the best that both ends have. `deadline_s`: of every wait; `open_s`:
        of the constructor's, where it is another one. `groups`: tensors of different groups may be
        pushed with different hyper-parameters. `consistency` and `staleness`, where given, must be
        what the job was submitted with. `device`: "cuda" or "cuda:1": gradients and parameters are
        arrays on that GPU (cupy's, or PyTorch's). `total_momentum`: momenta are those of a whole
        asynchronous job (push_hyper.py). `fractional_share`: aggregators of less than a core will
        do (an emulated pool's). `noise`: measure what `gradient_squares` returns.

        Raises Rejected when the job cannot be had as described, DeadlineExceeded when it does not
        come about in time, Unavailable when nobody listens, ConfigRejected for `credentials`.
        """
        identity = identify(job, rank, workers, url)
        self.job, self.rank, started_with, self._result_path = identity
        self._dtype, self._deadline_s, self._closed = gradient_dtype, deadline_s, False
        self._device = device_named(device) if device else None
        self._specs, values = read_tensors(tensors, groups or {}, self._device, self._tables)
        wanted = JobSpec(
            id=self.job or LOCAL, model=model, workers=started_with, servers=servers,
            iterations=iterations, gradient_dtype=gradient_dtype, update=update or UpdateRule(),
            consistency=consistency or "synchronous", staleness=staleness or 0,
            fractional_share=fractional_share, noise=noise, virtual_ranks=self._virtual_ranks,
        )  # fmt: skip
        forced = forced_transport(transport, os.environ.get("SLACKWATER_TRANSPORT"))
        self._session = self._session_of(wanted, values, url, credentials, forced)
        self._session.open(open_s or deadline_s)
        plan, on_device = self._session.plan, self._device is not None
        assert plan is not None
        self._total_momentum = total_momentum and plan.consistency == "asynchronous"
        if wrong := unfit(plan, consistency, staleness, on_device=on_device):
            self._session.close(None)
            raise Rejected(wrong)
        self._begin()
        self._leave = at_exit(self.close, self._give_up)

    def _session_of(
        self,
        spec: JobSpec,
        values: Initial,
        url: str | None,
        credentials: Credentials | None,
        transport: str | None,
    ) -> Session | Local:
        """Open a session with the cluster, or train alone where no job is named, here or in the
        environment. Raises Rejected."""
        if self.job:
            return Session(
                spec,
                self.rank,
                self._specs,
                values,
                way(self.job, url, credentials),
                submitted=self._result_path is not None,
                transport=transport,
                deadline_s=self._deadline_s,
                device=self._device,
            )
        if self._device is not None:
            raise plainly(
                "without a job there is no aggregator, and parameters are in host memory: give the "
                "Agent no device, or name a job"
            )
        self.job = spec.id
        tell_how_to_submit()
        return Local(spec, self._specs, values)

    def _begin(self) -> None:
        """Iterations go on where the job is. A program that was started again while its buckets
        differ by one version repeats that iteration: what was counted is not counted again."""
        plan = self._session.plan
        assert plan is not None
        self._rule = plan.update.name
        self._buckets = self._session.buckets
        self._places: dict[str, tuple[WorkerBucket, int]] = {
            spec.name: (bucket, position)
            for bucket in self._buckets
            for position, spec in enumerate(bucket.tensors)
        }
        self._divided = self._find_divided()
        iterations = [bucket.iteration for bucket in self._buckets]
        self._iteration, newest = min(iterations), max(iterations)
        self._retried = newest if newest > self._iteration else None
        self._standing = {
            (bucket.index, position)
            for bucket in self._buckets
            for position in range(len(bucket.tensors))
            if bucket.iteration > self._iteration
        }
        for bucket in self._buckets:
            bucket.confirmed = min(bucket.version, self._iteration)
        self._behind = sum(bucket.confirmed <= self._iteration for bucket in self._buckets)
        self._session.progress.first_iteration = self._iteration + 1
        self._ended_s = time.monotonic()

    def _find_divided(self) -> dict[str, Divided]:
        """Raises Rejected."""
        divided = divided_tensors(self._specs, self._buckets)
        if divided and self._device is not None:
            self._session.close(None)
            raise Rejected(
                f"job {self.job}: tensor {next(iter(divided))} is divided, which it cannot be on a "
                "device: give the Agent none, or the controller divide_bytes = 0"
            )
        return divided

    # Push and pull --------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """How many iterations the program has waited for; the one being produced is one more."""
        return self._iteration

    @property
    def untouched(self) -> bool:
        """Say whether nothing was pushed in this worker's place, and no update was made."""
        return all(bucket.iteration == bucket.version == 0 for bucket in self._buckets)

    @property
    def workers(self) -> int:
        """How many workers the job has in the next iteration, as far as this one knows: others may
        come or go with it (Session.size)."""
        return self._session.size(self._iteration + 1).workers

    @property
    def gradients(self) -> int:
        """How many gradients all iterations were made of that the program has waited for, one of
        each worker. In the next one this worker's is number `gradients + rank`: whatever the number
        of workers was and will be, a batch chosen by that number is trained with once."""
        plan = self._session.plan
        if plan is not None and plan.active and plan.consistency == "asynchronous":
            return self._iteration * plan.workers  # Each worker counts for itself.
        return self._session.size(self._iteration).gradients(self._iteration)

    @property
    def updates(self) -> int:
        """Count the gradients, of any worker, in the parameters that this one has."""
        return min(sum(bucket.contained) or self.gradients for bucket in self._buckets)

    @property
    def rule(self) -> str:
        """The name of the job's update rule."""
        return self._rule

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(self._places)

    def push(self, name: str, gradient: Array | None = None, **hyper: float) -> None:
        """Push this worker's gradient of a tensor for its next iteration. None: it was produced in
        the `gradient_buffer`. `hyper`: hyper-parameters of this push (UpdateRule has their names),
        where they are not the job's; one set a bucket, the last given counts.

        Waits while the slot still holds the iteration before. After a GradientRefused, pushing the
        same iteration again is a retry: what was counted already is not counted twice.
        """
        divided = self._divided.get(name)
        bucket, position = self._place(name)
        spec = divided.spec if divided is not None else bucket.tensors[position]
        if self._device is not None:
            gradient = arrived(gradient, self._device)
        if gradient is not None and (wrong := check_gradient(gradient, spec, self._dtype)):
            raise GradientRefused(self.job, name, self.rank, bucket.iteration + 1, wrong)
        if divided is None:
            return self._push(bucket, position, gradient, hyper)
        flat = None if gradient is None else gradient.reshape(-1)
        for part, first, end in divided.pieces:
            self._push(part, 0, None if flat is None else flat[first:end], hyper)

    def _push(
        self, bucket: WorkerBucket, at: int, gradient: Array | None, hyper: Mapping[str, float]
    ) -> None:
        if self._is_counted(bucket, at):
            self._standing.discard((bucket.index, at))
            return
        if not bucket.settled or bucket.refused is not None:
            self._settle((bucket,))
        bucket.choose_hyper(self.job, hyper)
        if self._total_momentum and len(bucket.missing) == 1:  # It goes with this tensor.
            bucket.hyper = left_to_give(bucket.hyper, self.workers)
        before = bucket.iteration
        bucket.put(at, gradient)
        self._session.progress.bytes_pushed += bucket.bytes_of(at)
        if bucket.iteration != before:
            bucket.pushed_s = time.monotonic()
            self._session.ring(bucket)

    def gradient_buffer(self, name: str) -> Any:
        """The tensor's place in the slot: produce the gradient there, then push(name). Ask for it
        anew in every iteration: a bucket that moved has another slot."""
        buckets = self._buckets_of(name)
        if any(not bucket.settled or bucket.refused is not None for bucket in buckets):
            self._settle(buckets)
        if name in self._divided:
            return self._divided[name].gradient()
        bucket, position = self._place(name)
        view = bucket.handed_out_views[position] = bucket.gradients[position]
        return self._presented(view)

    def pull(self, name: str, out: Any = None) -> Any:
        """The tensor's parameters after its last pushed iteration: a read-only view, or `out`."""
        self._confirm(self._places_of(name))
        if name in self._divided:
            view = self._divided[name].parameters()
            view.flags.writeable = False
        else:
            bucket, position = self._place(name)
            view = bucket.parameters(position)
        if out is None:
            return self._presented(view)
        whole = self._device is not None and self._device.is_array(out)
        copy_into(self._device.wrap(out) if whole and self._device else out, view)
        return out

    def parameters_buffer(self, name: str) -> Any:
        """Return the parameters like `pull`, but without numpy's protection: for a binding whose
        tensors know none. Over shared memory they are the master copy, which must not be written
        to."""
        self._confirm(self._places_of(name))
        if name in self._divided:
            return self._divided[name].parameters()
        bucket, position = self._place(name)
        return self._presented(bucket.buffer(position))

    def _presented(self, array: Any) -> Any:
        """Present the array as the program's library has it."""
        return array if self._device is None else self._device.present(array)

    def wait(self, names: Iterable[str] | None = None) -> int:
        """Until the last pushed iteration of these tensors (None: of all) has been applied.
        Returns how many iterations have been waited for whole."""
        if names is None:
            self._confirm((each, at) for each in self._buckets for at in range(len(each.tensors)))
        else:
            self._confirm(place for name in names for place in self._places_of(name))
        return self._iteration

    def ready(self, names: Iterable[str]) -> bool:
        """Say whether `wait(names)` would return at once. It does not stand for waiting: only what
        was waited for counts towards an iteration."""
        return all(
            (bucket.version >= bucket.iteration and bucket.refused is None) or self._stands(bucket)
            for name in names
            for bucket in self._buckets_of(name)
        )

    def step(self, gradients: Mapping[str, Array], **hyper: float) -> dict[str, Floats]:
        """Push every tensor's gradient, wait for the update, return the parameters (as `pull`)."""
        missing = [name for name in self._places if name not in gradients]
        unknown = [name for name in gradients if name not in self._places]
        if missing or unknown:
            raise Rejected(
                f"job {self.job}: a step takes every tensor once; missing {missing[:5]}, "
                f"unknown {unknown[:5]}"
            )
        for name, gradient in gradients.items():
            self.push(name, gradient, **hyper)
        self.wait()
        return self.parameters()

    def parameters(self) -> dict[str, Floats]:
        """All tensors, as `pull` returns them."""
        return {name: self.pull(name) for name in self._places}

    def states(self) -> dict[str, TensorState]:
        """Copies of the update rule's states after the last push, which was waited for."""
        self.wait()
        run = getattr(self._session, "run", None)  # One that trains alone has no thread.
        return read_states(self._specs, self._buckets, run, self._deadline_s)

    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version among the buckets: equal after `wait()`."""
        return min(b.version for b in self._buckets), max(b.version for b in self._buckets)

    def gradient_squares(self, iteration: int) -> GradientSquares | None:
        """Return the squared lengths of the gradients of an iteration that was waited for whole,
        until the next is pushed. None where they are not known: a single worker, `noise` was not
        asked for, folds on a GPU, the first version of a state of Adam's or Adagrad's."""
        return add_squares(self._buckets, iteration)

    @property
    def reads(self) -> tuple[int, int]:
        """Count how often all buckets' parameters were read over a network, and how many of these
        reads an update overtook. Both are 0 for a synchronous job."""
        return reads_of(bucket.staging for bucket in self._buckets)

    # How it works ---------------------------------------------------------------------------------

    def _place(self, name: str) -> tuple[WorkerBucket, int]:
        try:
            return self._places[name]
        except KeyError:
            raise Rejected(f"job {self.job} has no tensor {name!r}") from None

    def _buckets_of(self, name: str) -> tuple[WorkerBucket, ...]:
        """Return the tensor's bucket; several, if the tensor is divided."""
        divided = self._divided.get(name)
        return divided.buckets if divided is not None else (self._place(name)[0],)

    def _places_of(self, name: str) -> Iterable[tuple[WorkerBucket, int]]:
        """(bucket, which of its tensors): one, unless the tensor is divided."""
        divided = self._divided.get(name)
        if divided is None:
            return (self._place(name),)
        return tuple((bucket, 0) for bucket in divided.buckets)  # A part is its bucket's first.

    def _is_counted(self, bucket: WorkerBucket, position: int) -> bool:
        """While an iteration is being repeated: this tensor's push of it stands."""
        return (
            self._retried is not None
            and bucket.refused is None
            and bucket.iteration >= self._retried > bucket.confirmed
            and position in bucket.missing
        )

    def _stands(self, bucket: WorkerBucket) -> bool:
        """Pushed in a former life of the program, which has not repeated it in this one: nothing
        that it pushed is outstanding there, so it waits for nothing. (Workers that were started
        again and waited for one another's pushes would wait for ever.)"""
        return any(index == bucket.index for index, _ in self._standing)

    def _settle(self, buckets: Sequence[WorkerBucket]) -> None:
        """Wait, and raise the refusal, if any."""
        if any(not bucket.settled for bucket in buckets):
            self._session.wait(buckets, self._deadline_s)
        if self._session.failure is not None:
            raise self._session.failure
        for bucket in buckets:
            if bucket.refused is not None:
                refused = bucket.take_refusal(self.rank)
                assert refused is not None
                self._retried = refused.iteration
                raise refused

    def _confirm(self, places: Iterable[tuple[WorkerBucket, int]]) -> None:
        """A tensor that is not pushed yet is waited for as of the iteration before, whether or not
        others of its bucket are pushed already."""
        named: dict[int, WorkerBucket] = {}
        for bucket, position in places:
            if position not in bucket.missing:
                names = [bucket.tensors[position].name for position in sorted(bucket.missing)]
                raise Rejected(
                    f"job {self.job}: iteration {bucket.iteration + 1} cannot be waited for before "
                    f"these tensors, which share a bucket, are pushed: {', '.join(names[:5])}"
                )
            named[bucket.index] = bucket
        buckets = [each for each in named.values() if not self._stands(each)]
        needed_s = time.monotonic()
        self._settle(buckets)
        for bucket in buckets:
            if bucket.confirmed < (version := bucket.reached):
                if bucket.pushed_s:
                    self._session.progress.needed(bucket.index, needed_s - bucket.pushed_s)
                self._behind -= bucket.confirmed <= self._iteration < version
                bucket.confirmed = version
                self._session.progress.bytes_pulled += 4 * bucket.bounds[-1][1]
        if self._behind == 0:
            self._count_iteration()

    def _count_iteration(self) -> None:
        """An iteration ends when all its tensors have been waited for."""
        complete = min(bucket.confirmed for bucket in self._buckets)
        if self._retried is not None and complete >= self._retried:
            self._retried = None
        now_s = time.monotonic()
        durations_s, ended = self._session.progress.durations_s, complete - self._iteration
        durations_s.extend([(now_s - self._ended_s) / ended] * ended)
        self._ended_s, self._iteration = now_s, complete
        self._behind = sum(bucket.confirmed <= complete for bucket in self._buckets)
        self._session.on_boundary(complete)

    # The end --------------------------------------------------------------------------------------

    def close(self, result: Any = None) -> None:
        """End the rank as done: the result (anything that JSON can say, at most 4 KiB) goes to the
        master, with the exit code where the worker service started this program. Called at exit,
        unless an exception ends the program. Idempotent."""
        if self._closed:
            return
        text = "" if result is None else json.dumps(result)
        if len(text.encode()) > limits.RESULT_BYTES_MAX:
            raise Rejected(
                f"a result of {len(text.encode())} bytes, at most {limits.RESULT_BYTES_MAX}"
            )
        self._closed = True
        atexit.unregister(self._leave)
        if self._result_path is not None:
            write_result(Path(self._result_path), text)
        self._session.close(text if self._result_path is None else None)

    def _give_up(self, error: BaseException | None) -> None:
        """End without being done: whoever started the program learns that from how it ends."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        self._session.close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up(error)
