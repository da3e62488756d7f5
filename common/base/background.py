"""Tasks, callbacks and threads that nobody awaits: a failure of one is told, never silent.

An exception that ends a task which nobody awaits is a line in a log at best; whoever waits for what
the task was to do waits for ever. So an owner starts everything of that kind here, under a name,
and runs its own life `alongside`: the first unexpected exception ends that life with the reason.
Expected errors are handled by the work itself.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from slackwater.common.base.errors import Fatal, SlackwaterError

T = TypeVar("T")
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Failure:
    """The first of an owner."""

    name: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.name} failed: {self.reason}"

    @property
    def expected(self) -> bool:
        """Say whether the message alone tells what was wrong."""
        return isinstance(self.error, SlackwaterError | OSError)

    @property
    def reason(self) -> str:
        return str(self.error) if self.expected else repr(self.error)


class Tasks:
    """Tasks that one owner has begun on its loop. `fail` is told the name and the exception of one
    that raised; cancelling one is not a failure."""

    def __init__(self, fail: Callable[[str, BaseException], None]) -> None:
        self._fail = fail
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In order: a set's would differ from run to run of a simulation."""

    @property
    def running(self) -> int:
        """Return how many have not ended yet. It is not `__len__`: an owner without tasks would be
        false."""
        return len(self._tasks)

    def group(self) -> "Tasks":
        """Return a part of these, which is waited for and cancelled by itself. Its failures, too,
        are the owner's."""
        return _Group(self)

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        name = name or getattr(work, "__qualname__", "task")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(task.get_name(), error)

    def cancel(self) -> None:
        """Cancel all that run."""
        for task in tuple(self._tasks):
            task.cancel()

    async def ended(self) -> None:
        """Return when none runs any more, but for the one that asks."""
        while self._others():
            await self.begun_ended()

    async def begun_ended(self, timeout_s: float | None = None) -> None:
        """Return when those that run now have ended, whatever is spawned meanwhile; or after so
        long."""
        if begun := self._others():
            await asyncio.wait(begun, timeout=timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """Cancel all that run, but for the one that asks, and return when they have ended; or after
        so long."""
        for task in self._others():
            task.cancel()
        await self.begun_ended(timeout_s)

    def _others(self) -> list[asyncio.Task[Any]]:
        """Return all that run, but for the one that asks: it cannot wait for itself."""
        return [task for task in self._tasks if task is not asyncio.current_task()]


class _Group(Tasks):
    def __init__(self, owner: Tasks) -> None:
        super().__init__(owner._fail)
        self._owner = owner

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        task = self._owner.spawn(work, name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task


class Background(Tasks):
    """Tasks, callbacks and threads of one owner. Its methods belong to the owner's loop, but for
    `post`."""

    def __init__(self) -> None:
        super().__init__(self.fail)
        self.failure: Failure | None = None
        self._failed = asyncio.Event()

    def guarded(self, function: Callable[..., object]) -> Callable[..., None]:
        """`function` as a callback of the loop, which drops what callbacks raise."""

        def call(*arguments: Any) -> None:
            try:
                function(*arguments)
            except Exception as error:  # A loop would log it and go on: here it is kept.
                self.fail(getattr(function, "__qualname__", repr(function)), error)

        return call

    def post(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[..., object],
        *arguments: Any,
    ) -> bool:
        """Call it on `loop`; from any thread. False: the loop is closed, nobody waits any more."""
        try:
            loop.call_soon_threadsafe(self.guarded(function), *arguments)
        except RuntimeError:
            return False
        return True

    def thread(self, target: Callable[[], None], name: str) -> "Thread":
        """A thread that reports to this loop; it is not started yet."""
        return Thread(self, target, name)

    def fail(self, name: str, error: BaseException) -> None:
        """Note a failure. The first one is the owner's reason to end: its state cannot be relied
        on."""
        failure = Failure(name, error)
        trace = None if failure.expected else error
        _log.error("background.failed", name=name, reason=failure.reason, exc_info=trace)
        if self.failure is None:
            self.failure = failure
            self._failed.set()

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises Fatal when something in the background fails before."""
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise Fatal(str(self.failure)) from self.failure.error
            return task.result()
        finally:
            for one in (task, failed):
                one.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)


class Thread:
    """A daemon thread: a process may end while it hangs in a system call."""

    def __init__(self, background: Background, target: Callable[[], None], name: str) -> None:
        self._background = background
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._target()
        except BaseException as error:
            self._background.post(self._loop, self._background.fail, self._thread.name, error)
        finally:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody joins it.
                self._loop.call_soon_threadsafe(self._over.set)

    async def join(self) -> None:
        """Return when the thread has ended, or was never started. No other thread waits."""
        if self._thread.ident is not None:
            await self._over.wait()
            self._thread.join()
