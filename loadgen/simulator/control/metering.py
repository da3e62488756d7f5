"""Where the processor's time of a simulated system goes, by party.

Each party (a service, a client) runs in a context of its own, which its tasks, timers and arriving
messages inherit. The loop adds the time of each callback to the party in whose context it runs: so
decoding, the core's step, records and answers all count, as they do live in a process of its own.
What the bus and its client library cost live is not in it.
"""

import time
from asyncio import Handle, TimerHandle
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from slackwater.common.base.histogram import LATENCY_S, Histogram
from slackwater.common.shell.simulated_loop import SimLoop
from slackwater.loadgen.simulator.control.services import PARTY

Ts = TypeVarTuple("Ts")


class Spent:
    """The time of one party: in all, and by callback."""

    __slots__ = ("callbacks_s", "longest_s", "total_s")

    def __init__(self) -> None:
        self.total_s = self.longest_s = 0.0
        self.callbacks_s = Histogram(LATENCY_S)


class MeteredLoop(SimLoop):
    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        super().__init__()

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Handle:
        return super().call_soon(self._timed, callback, args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        return super().call_at(when, self._timed, callback, args, context=context)

    def _timed(self, callback: Callable[[*Ts], object], args: tuple[*Ts]) -> None:
        began_s = time.thread_time()
        try:
            callback(*args)
        finally:
            took_s = time.thread_time() - began_s
            party = PARTY.get()
            spent = self.spent.get(party)
            if spent is None:
                spent = self.spent[party] = Spent()
            spent.total_s += took_s
            spent.callbacks_s.add(took_s)
            spent.longest_s = max(spent.longest_s, took_s)
