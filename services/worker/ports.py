"""The ports at which the ranks of gangs meet, each kept from others until rank 0 listens on it.

Rank 0 of a gang listens, as torch.distributed has it, in a process that starts a second or more
after its port was told to all nodes. A bound socket that never listens keeps the port: the system
gives it to nobody who asks for any free one, and rank 0, which names it, may bind it besides
(SO_REUSEADDR on both).
"""

import socket
from collections.abc import Iterable
from typing import NamedTuple

from slackwater.schemas.workers import RESERVED_S


class _Kept(NamedTuple):
    attempt: int
    until_s: float
    socket: socket.socket


class KeptPorts:
    """One port for each job whose gang begins on this node, or runs there."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def take(
        self,
        job: str,
        attempt: int,
        ranks: Iterable[tuple[str, int]],
        now_s: float,
        kept_s: float = RESERVED_S,
    ) -> int:
        """Return the port of the job's attempt, the same one each time. `ranks`: jobs and ranks on
        this node; ports of other jobs are given up after their `kept_s`. Raises OSError."""
        here = {job for job, _ in ranks}
        for other, kept in tuple(self._kept.items()):
            if other == job:
                over = kept.attempt != attempt
            else:
                over = other not in here and now_s > kept.until_s
            if over:
                self._kept.pop(other).socket.close()
        if job not in self._kept:
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind(("", 0))
            except OSError:
                made.close()
                raise
            self._kept[job] = _Kept(attempt, now_s + kept_s, made)
        return int(self._kept[job].socket.getsockname()[1])

    def close(self) -> None:
        """Keep no port any more."""
        for kept in self._kept.values():
            kept.socket.close()
        self._kept.clear()
