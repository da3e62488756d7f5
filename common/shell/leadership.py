"""Leadership: one of several instances holds a key with a time to live, the others stand by.

The lease only decides who tries. Safety is the buckets' fence: a leader that slept through the end
of its lease cannot write, and its commands are refused by their epoch.
"""

import asyncio
import random
from collections.abc import Callable

import structlog

from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import Deposed, Retryable
from slackwater.common.base.failpoints import failpoint
from slackwater.common.store.base import Lease, Over, Store

BUCKET = "leases"
_log = structlog.get_logger()


async def acquire(
    store: Store,
    key: str,
    owner: str,
    clock: Clock,
    rng: random.Random,
    ttl_s: float,
    standby: Callable[[], None],
    over: Over,
) -> tuple[Lease, float]:
    """Return once the lease is `owner`'s, with until when it holds; `standby` is called when it is
    not so at once. `owner` names one life of an instance. The lease of a life that is `over` is
    taken at once, any other's when it ends."""
    told = False
    while True:
        asked_s = clock.now_s()
        failpoint(f"{key}.lease.before")
        try:
            lease = await store.lease(BUCKET, key, owner, ttl_s, over)
        except Retryable as error:
            lease = None
            _log.warning("lease.unavailable", key=key, reason=str(error))
        if lease is not None:
            failpoint(f"{key}.lease.after")
            _log.info("lease.taken", key=key, owner=owner)
            return lease, asked_s + ttl_s
        if not told:
            told = True
            standby()
            _log.info("lease.standby", key=key, owner=owner)
        await clock.sleep_until(clock.now_s() + ttl_s / 3 * rng.uniform(0.8, 1.2))


async def keep(
    lease: Lease, key: str, clock: Clock, ttl_s: float, held: Callable[[float], None]
) -> None:
    """Renew every third of the time to live, and tell until when the lease is held. Raises Deposed
    once it is lost."""
    held_until_s = clock.now_s() + ttl_s
    while True:
        await clock.sleep_until(clock.now_s() + ttl_s / 3)
        asked_s = clock.now_s()
        try:
            failpoint(f"{key}.renew.before")
            async with asyncio.timeout(ttl_s / 3):
                renewed = await lease.renew()
            failpoint(f"{key}.renew.after")
        except (Retryable, TimeoutError) as error:
            _log.warning("lease.unavailable", key=key, reason=str(error))
            if clock.now_s() < held_until_s:
                continue
            renewed = False
        if not renewed:
            raise Deposed(f"the lease {key} of {lease.owner} is lost: another instance may lead")
        held_until_s = asked_s + ttl_s
        held(held_until_s)
