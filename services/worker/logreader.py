"""Answers for what ranks printed: a bounded piece a request, at once or when there is some."""

import asyncio
from pathlib import Path
from typing import Final

from slackwater.common.base import limits
from slackwater.schemas.base import NOT_FOUND, Refused
from slackwater.schemas.logs import LogPiece, ReadLog, no_log
from slackwater.services.worker.effects import ReadRankLog
from slackwater.services.worker.events import AnswerReady
from slackwater.services.worker.processes import RankFiles
from slackwater.services.worker.ranklog import Piece

_LOOK_S: Final = 0.05
_TYPED_LOOK_S: Final = 0.005
_TYPED_S: Final = 2.0


class LogReader:
    """Handles the core's `ReadRankLog`."""

    def __init__(self, node: str, state_dir: Path) -> None:
        self._node, self._state_dir = node, state_dir
        self.stopping = asyncio.Event()
        self._typed: dict[tuple[str, int], float] = {}
        """Ranks at which somebody types, and until when their logs are looked at often."""

    def typed(self, job: str, rank: int) -> None:
        """Look at the rank's log often from now on: somebody waits for each character."""
        now_s = asyncio.get_running_loop().time()
        self._typed = {key: until_s for key, until_s in self._typed.items() if until_s > now_s}
        self._typed[job, rank] = now_s + _TYPED_S

    async def read(self, effect: ReadRankLog) -> AnswerReady:
        asked, over, code = effect.asked, effect.over, effect.code
        loop = asyncio.get_running_loop()
        files = RankFiles(self._state_dir, asked.job, asked.rank, effect.attempt)
        if effect.tenant and files.intent().tenant != effect.tenant:
            refused = Refused(reason=no_log(self._node, asked), code=NOT_FOUND)
            return AnswerReady(effect.token, refused)
        offset = files.log.tail(asked.tail) if asked.offset is None else asked.offset
        until_s = loop.time() + min(asked.wait_s, limits.LOG_WAIT_S)
        while True:
            newest = files.log.newest()
            ended = over or (files.code() is not None and files.logged())
            piece = files.log.read(offset, limits.LOG_PIECE_BYTES)
            if piece.data or ended or loop.time() >= until_s or self.stopping.is_set():
                return AnswerReady(
                    effect.token, _answer(asked, files, piece, ended, code if over else None)
                )
            key = asked.job, asked.rank
            while loop.time() < until_s and not self.stopping.is_set():
                often = loop.time() < self._typed.get(key, 0.0)
                await asyncio.sleep(_TYPED_LOOK_S if often else _LOOK_S)
                if files.log.newest() != newest or files.path("exit").exists():
                    break


async def until_logged(files: RankFiles) -> None:
    """Return once what the rank printed is in its log. A process that left its group may print for
    ever."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limits.LOG_DRAIN_S
    while not files.logged():
        if loop.time() > until_s:
            return
        await asyncio.sleep(_TYPED_LOOK_S)


def _answer(
    asked: ReadLog, files: RankFiles, piece: Piece, ended: bool, code: int | None
) -> LogPiece:
    last = ended and piece.start + len(piece.data) >= piece.end
    if last and code is None:
        code = files.code()
    return LogPiece(
        job=asked.job,
        rank=asked.rank,
        start=piece.start,
        data=piece.data,
        begin=piece.begin,
        end=piece.end,
        ended=last,
        code=(code or 0) if last else 0,
        ended_s=files.ended_s() if last else 0.0,
    )
