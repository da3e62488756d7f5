"""Ask again until whoever is asked can answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slackwater.common.base.errors import Retryable

T = TypeVar("T")


async def eventually(ask: Callable[[], Awaitable[T]], within_s: float = 60.0) -> T:
    """Return the first answer. Raises Retryable once `within_s` has passed without one."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            return await ask()
        except Retryable:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.1)
