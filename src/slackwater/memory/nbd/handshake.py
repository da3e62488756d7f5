"""The newstyle handshake, without its socket: each option's answer, and what was agreed upon.

One export; its name is not looked at where a client gives another than the default, except that an
unknown one is refused as the protocol wants it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from slackwater.common.base import limits
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.store import PAGE_BYTES

FLAGS: Final = (
    nbd.HAS_FLAGS
    | nbd.SEND_FLUSH
    | nbd.SEND_FUA
    | nbd.SEND_TRIM
    | nbd.SEND_WRITE_ZEROES
    | nbd.SEND_DF
    | nbd.CAN_MULTI_CONN
    | nbd.SEND_CACHE
)
"""CAN_MULTI_CONN: a flush on any connection covers what every other one was answered."""


@dataclass(frozen=True, slots=True)
class Export:
    name: str
    size_bytes: int


@dataclass(slots=True)
class Handshake:
    """`transmitting` once an option has ended the negotiation, `over` once the client gave up."""

    export: Export
    admit: Callable[[], bool] = lambda: True
    """Asked when the client would be served: whether there is room for it."""
    zeroes: bool = True
    """The 124 zero bytes behind an old EXPORT_NAME's answer; a client may do without."""
    chunked: bool = False
    allocation: bool = False
    """BLOCK_STATUS may be asked, for `base:allocation`."""
    transmitting: bool = False
    over: bool = False

    def greeting(self) -> bytes:
        flags = nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES
        return nbd.GREETING.pack(nbd.INIT_MAGIC, nbd.OPTION_MAGIC, flags)

    def client_flags(self, flags: int) -> str:
        """Why the client cannot be served, or nothing."""
        if flags & ~(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES):
            return f"unknown client flags {flags:#x}"
        self.zeroes = not flags & nbd.NO_ZEROES
        return ""

    def option(self, option: int, body: bytes) -> bytes:
        match option:
            case nbd.OPT_EXPORT_NAME:
                if not (self._known(body) and self.admit()):
                    self.over = True  # This option has no way to say no.
                    return b""
                self.transmitting = True
                answer = nbd.EXPORT_NAME_REPLY.pack(self.export.size_bytes, FLAGS)
                return answer + bytes(124) if self.zeroes else answer
            case nbd.OPT_ABORT:
                self.over = True
                return nbd.option_reply(option, nbd.REP_ACK)
            case nbd.OPT_LIST if body:
                return nbd.option_reply(option, nbd.REP_ERR_INVALID, b"LIST takes no data")
            case nbd.OPT_LIST:
                name = self.export.name.encode()
                entry = len(name).to_bytes(4, "big") + name
                reply = nbd.option_reply(option, nbd.REP_SERVER, entry)
                return reply + nbd.option_reply(option, nbd.REP_ACK)
            case nbd.OPT_STRUCTURED_REPLY if body:
                return nbd.option_reply(option, nbd.REP_ERR_INVALID, b"takes no data")
            case nbd.OPT_STRUCTURED_REPLY:
                self.chunked = True
                return nbd.option_reply(option, nbd.REP_ACK)
            case nbd.OPT_LIST_META_CONTEXT | nbd.OPT_SET_META_CONTEXT:
                return self._contexts(option, body)
            case nbd.OPT_INFO | nbd.OPT_GO:
                return self._info(option, body)
        return nbd.option_reply(option, nbd.REP_ERR_UNSUP, f"option {option}".encode())

    def _known(self, name: bytes) -> bool:
        return name in (b"", self.export.name.encode())

    def _contexts(self, option: int, body: bytes) -> bytes:
        """Answer a query for metadata contexts, or choose those that the client wants."""
        setting = option == nbd.OPT_SET_META_CONTEXT
        self.allocation &= not setting
        if not self.chunked:
            return nbd.option_reply(option, nbd.REP_ERR_INVALID, b"structured replies come first")
        words = _lengths_and_bytes(body)
        if words is None:
            return nbd.option_reply(option, nbd.REP_ERR_INVALID, b"lengths do not fit")
        name, *queries = words
        if not self._known(name):
            return nbd.option_reply(
                option, nbd.REP_ERR_UNKNOWN, f"no export {name[:64]!r}".encode()
            )
        wanted = {nbd.ALLOCATION} if setting else {nbd.ALLOCATION, b"base:"}
        found = bool(wanted.intersection(queries)) or not (queries or setting)
        self.allocation |= setting and found
        entry = nbd.CONTEXT.pack(nbd.ALLOCATION_ID) + nbd.ALLOCATION
        reply = nbd.option_reply(option, nbd.REP_META_CONTEXT, entry) if found else b""
        return reply + nbd.option_reply(option, nbd.REP_ACK)

    def _info(self, option: int, body: bytes) -> bytes:
        length = int.from_bytes(body[:4], "big")
        name, rest = body[4 : 4 + length], body[4 + length :]
        asked = int.from_bytes(rest[:2], "big")
        if len(body) < 6 or len(name) != length or len(rest) != 2 + 2 * asked:
            return nbd.option_reply(option, nbd.REP_ERR_INVALID, b"lengths do not fit")
        if not self._known(name):
            why = f"no export {name[:64]!r}; there is {self.export.name!r}".encode()
            return nbd.option_reply(option, nbd.REP_ERR_UNKNOWN, why)
        if option == nbd.OPT_GO and not self.admit():
            told = f"{limits.NBD_CONNECTIONS_MAX} clients are served, and no more: end one of them"
            return nbd.option_reply(option, nbd.REP_ERR_POLICY, told.encode())
        export = nbd.EXPORT.pack(nbd.INFO_EXPORT, self.export.size_bytes, FLAGS)
        sizes = nbd.BLOCK_SIZE.pack(
            nbd.INFO_BLOCK_SIZE, 1, PAGE_BYTES, limits.NBD_REQUEST_BYTES_MAX
        )
        reply = nbd.option_reply(option, nbd.REP_INFO, export)
        reply += nbd.option_reply(option, nbd.REP_INFO, sizes)
        if nbd.INFO_NAME in [
            int.from_bytes(rest[2 + 2 * i : 4 + 2 * i], "big") for i in range(asked)
        ]:
            named = nbd.INFO_NAME.to_bytes(2, "big") + self.export.name.encode()
            reply += nbd.option_reply(option, nbd.REP_INFO, named)
        self.transmitting = option == nbd.OPT_GO
        return reply + nbd.option_reply(option, nbd.REP_ACK)


def _lengths_and_bytes(body: bytes) -> list[bytes] | None:
    """The export's name and the queries of a META_CONTEXT option; None: the lengths do not fit."""
    words: list[bytes] = []
    at, left = 0, 1
    while left:
        length = int.from_bytes(body[at : at + 4], "big")
        words.append(body[at + 4 : at + 4 + length])
        at += 4 + length
        left -= 1
        if len(words) == 1:
            left = int.from_bytes(body[at : at + 4], "big")
            at += 4
        if at > len(body):
            return None
    return words if at == len(body) else None
