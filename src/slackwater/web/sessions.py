"""People who signed in to act: each with a connection to the bus as the user that they are.

So the bus decides what they may do, as it does for the command line.
"""

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from slackwater.client import AsyncClient
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.bus.access import Identity, Tls

SESSIONS_MAX: Final = 32
IDLE_S: Final = 3600.0
"""Seconds without an action after which one is signed out."""
REFUSED_PAUSE_S: Final = 1.0
"""Seconds that a refusal takes, one at a time: a password is not found by trying."""


@dataclass(slots=True)
class Session:
    client: AsyncClient
    user: str
    used_s: float
    stack: AsyncExitStack


class Sessions:
    """Sessions by a secret that their pages keep."""

    def __init__(self, url: str, tls: Tls) -> None:
        self._url = url
        self._tls = tls
        self._sessions: dict[str, Session] = {}
        self._one_at_a_time = asyncio.Lock()

    async def open(self, user: str, password: str, token: str) -> str:
        """Connect as that user. Return the session's secret. Raises Rejected where the bus does not
        let them in, Retryable where it is away or too many are signed in."""
        async with self._one_at_a_time:
            await self._sweep()
            if len(self._sessions) >= SESSIONS_MAX:
                raise Retryable(f"{SESSIONS_MAX} people are signed in: try again later", 60.0)
            stack = AsyncExitStack()
            try:
                identity = Identity(user=user, password=password, token=token, tls=self._tls)
                connecting = AsyncClient.connect(
                    self._url, credentials=identity, name="slackwater-web-user"
                )
                client = await stack.enter_async_context(connecting)
            except Rejected:
                await asyncio.sleep(REFUSED_PAUSE_S)
                raise
            secret = secrets.token_urlsafe(32)
            now_s = client.clock.now_s()
            self._sessions[secret] = Session(client, user or "by token", now_s, stack)
            return secret

    def find(self, secret: str) -> Session | None:
        """Return the session, and note that it is used; None: there is none, or it was idle for
        too long."""
        session = self._sessions.get(secret)
        if session is None:
            return None
        now_s = session.client.clock.now_s()
        if now_s - session.used_s > IDLE_S:
            return None
        session.used_s = now_s
        return session

    async def close(self, secret: str) -> None:
        session = self._sessions.pop(secret, None)
        if session is not None:
            await session.stack.aclose()

    async def close_all(self) -> None:
        for secret in list(self._sessions):
            await self.close(secret)

    async def _sweep(self) -> None:
        for secret, each in list(self._sessions.items()):
            if each.client.clock.now_s() - each.used_s > IDLE_S:
                await self.close(secret)
