"""A core's timers: one per key, by the world's clock."""

import asyncio
from collections.abc import Callable
from typing import Any

from slackwater.common.base import limits, tracing
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import EffectKey, TimerFired
from slackwater.common.base.errors import Fatal


class Timers:
    def __init__(self, clock: Clock, post: Callable[[Any], None]) -> None:
        self._clock = clock
        self._post = post
        self._handles: dict[EffectKey, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def start(self, key: EffectKey, at_s: float) -> None:
        """A later start of the same key replaces this one. A time in the past fires at once."""
        self.cancel(key)
        if len(self._handles) >= limits.TIMERS_MAX:
            raise Fatal(f"timer {key}: {limits.TIMERS_MAX} timers run already; the core leaks them")
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._handles[key] = asyncio.get_running_loop().call_later(delay_s, self._due, key, at_s)

    def cancel(self, key: EffectKey) -> None:
        handle = self._handles.pop(key, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _due(self, key: EffectKey, at_s: float) -> None:
        del self._handles[key]
        if self._clock.now_s() < at_s:  # The loop's clock and the world's differ by a rounding.
            self.start(key, at_s)
            return
        with tracing.under(""):  # Not part of what happened when it was started.
            self._post(TimerFired(key))
