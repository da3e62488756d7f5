"""TLS between hosts, for code that reads and writes a plain socket.

The compiled streams (ADR 12) work on descriptors, so nothing can stand between them and their
socket. A thread carries the bytes instead: it has the encrypted connection and one end of a socket
pair, the stream has the other end (ADR 26).

The listener shows the host's certificate. The one that connects shows none: its hello has a token.

An end without TLS's closing word counts as an end, as it does on a plain connection: a record says
itself how long it is, and a channel whose stream ended in the middle takes it up again.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any, Final

CHUNK_BYTES: Final = 256 * 1024
"""Bytes that are taken at a time, and held for a direction while the other side does not read."""
_CARRIERS_MAX: Final = 2
"""Threads of a process: each carries about as much as a link of 10 Gbit/s."""
_ROUNDS: Final = 4
"""Chunks that one connection moves before the others have their turn."""
_log = logging.getLogger("slackwater.transport")
_NEITHER: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True, slots=True)
class TlsEnds:
    """Contexts for the two ends; None: this process does not accept, or does not connect."""

    accepts: ssl.SSLContext | None = None
    connects: ssl.SSLContext | None = None


def accepting(context: ssl.SSLContext, sock: socket.socket) -> socket.socket:
    """Take over a connection that was accepted: `sock` is detached. Return a socket with what the
    peer sends; it ends where the peer cannot agree on a cipher."""
    return _carried(sock, context.wrap_bio, server_side=True)[0]


async def connecting(context: ssl.SSLContext, sock: socket.socket, host: str) -> socket.socket:
    """Take over a connection that was made to `host`, whose certificate has to name it: `sock` is
    detached, also where this raises. Return a socket for what is sent. Raises ssl.SSLError. The
    caller sets a deadline."""
    plain, agreed = _carried(sock, context.wrap_bio, server_hostname=host)
    try:
        await asyncio.wrap_future(agreed)
    except BaseException:
        plain.close()
        raise
    return plain


def _carried(
    sock: socket.socket, wrap: Callable[..., ssl.SSLObject], **side: Any
) -> tuple[socket.socket, "Future[None]"]:
    plain, stream = socket.socketpair()
    for end in (sock, plain, stream):
        end.setblocking(False)
    bios = ssl.MemoryBIO(), ssl.MemoryBIO()
    agreed: Future[None] = Future()
    agreed.set_running_or_notify_cancel()

    def tell(why: BaseException | None) -> None:
        if why is None:
            agreed.set_result(None)
        else:
            agreed.set_exception(why)

    cipher = wrap(*bios, **side)
    owned = socket.socket(fileno=sock.detach())  # The thread alone closes it.
    next(_carriers()).carry(Tunnel(owned, plain, cipher, bios, tell))
    return stream, agreed


@cache
def _carriers() -> Iterator["_Carrier"]:
    count = max(1, min(_CARRIERS_MAX, len(os.sched_getaffinity(0)) // 2))
    return cycle([_Carrier(f"tls-{number}") for number in range(count)])


class Tunnel:
    """A connection and the plain end that carries its bytes.

    `agreed` is told once: when both sides have a cipher (None), or why they have not.
    """

    def __init__(
        self,
        sock: socket.socket,
        plain: socket.socket,
        cipher: ssl.SSLObject,
        bios: tuple[ssl.MemoryBIO, ssl.MemoryBIO],
        agreed: Callable[[BaseException | None], None],
    ) -> None:
        self.sock, self.plain = sock, plain
        self._cipher = cipher
        self._from_peer, self._to_peer = bios
        self._agreed: Callable[[BaseException | None], None] | None = agreed
        self._encrypted, self._decrypted = memoryview(b""), memoryview(b"")
        """Bytes that the socket, and the plain end, have not taken yet."""
        self._peer_ended = self._plain_ended = False
        self.abandoned = False
        """The plain end is closed, in both directions."""

    def work(self, scratch: memoryview) -> bool:
        """Move what can be moved. Return whether there may be more at once. Raises OSError."""
        moved = True
        for _ in range(_ROUNDS):
            moved = self._receive(scratch)
            if self._agreed is not None:
                moved |= self._agree()
            else:
                moved |= self._decrypt(scratch) | self._encrypt(scratch)
            moved |= self._send()
            if not moved:
                break
        return moved

    @property
    def over(self) -> bool:
        """Say whether both directions have ended, and all was sent that could be; or nobody waits
        for the cipher any more."""
        if self.abandoned and self._agreed is not None:
            return True
        if self._encrypted or not self._plain_ended:
            return False
        return self.abandoned or (self._peer_ended and not self._decrypted)

    def wanted(self) -> tuple[int | None, int | None]:
        """Return what to wait for, as epoll's events: at the socket, and at the plain end. None: do
        not ask it, for an end that hung up would wake the thread again and again."""
        of_sock = select.EPOLLOUT if self._encrypted else 0
        if self._takes:
            of_sock |= select.EPOLLIN
        if self.abandoned:
            return of_sock or None, None
        of_plain = select.EPOLLOUT if self._decrypted else 0
        if self._agreed is None and not self._plain_ended and not self._encrypted:
            of_plain |= select.EPOLLIN
        return of_sock or None, of_plain

    def end(self, why: BaseException | None) -> None:
        """Close both ends, after a last try to tell the peer why. Idempotent."""
        with contextlib.suppress(OSError):
            self._send()
        self.sock.close()
        self.plain.close()
        self._tell(why or ConnectionError("the connection ended before a cipher was agreed on"))

    def _tell(self, outcome: BaseException | None) -> None:
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            agreed(outcome)

    @property
    def _takes(self) -> bool:
        """Say whether there is room for more of the peer's. One that has TLS answer again and again
        (changes of keys), and does not read, is not read either."""
        waiting = self._decrypted or len(self._encrypted) > 2 * CHUNK_BYTES
        return not self._peer_ended and not waiting

    # From the peer --------------------------------------------------------------------------------

    def _receive(self, scratch: memoryview) -> bool:
        if not self._takes or self._from_peer.pending:
            return False
        try:
            count = self.sock.recv_into(scratch)
        except BlockingIOError:
            return False
        if count:
            self._from_peer.write(scratch[:count])
        else:
            self._peer_ended = True  # The cipher is not told: it would not encrypt any more.
        return True

    def _agree(self) -> bool:
        """Take the next step of the handshake. Raises ssl.SSLError."""
        try:
            self._cipher.do_handshake()
        except _NEITHER:
            if self._peer_ended:
                raise ssl.SSLEOFError("the peer ended the connection") from None
            return bool(self._to_peer.pending)
        finally:
            self._fetch()  # An alert too: it tells the peer why.
        self._tell(None)
        return True

    def _decrypt(self, scratch: memoryview) -> bool:
        count = 0
        while not self._decrypted and count < len(scratch):
            read = self._read(scratch[count:])
            if read is None:
                break
            if not read:
                self._peer_ended = True
                break
            count += read
        self._fetch()  # An answer of TLS's own, to a change of keys.
        self._decrypted = self._decrypted or scratch[:count]
        moved = self._deliver()
        if self._decrypted.obj is scratch.obj:  # The rest waits, and others use the scratch.
            self._decrypted = memoryview(bytes(self._decrypted))
        return moved

    def _read(self, into: memoryview) -> int | None:
        """Decrypt a record, at most. Return its bytes, 0 at the end; None: it has not come."""
        try:
            count: Any = self._cipher.read(len(into), into)
            return int(count)
        except _NEITHER:
            return None
        except ssl.SSLZeroReturnError:
            return 0

    def _deliver(self) -> bool:
        moved = False
        if self._decrypted:
            try:
                sent = self.plain.send(self._decrypted)
            except BlockingIOError:
                return False
            except OSError:  # It is read no more: what was to be sent still leaves.
                self._decrypted = memoryview(b"")
                self._peer_ended = self._plain_ended = self.abandoned = True
                return False
            self._decrypted = self._decrypted[sent:]
            moved = True
        if self._peer_ended and not self._decrypted:
            with contextlib.suppress(OSError):  # It was closed meanwhile.
                self.plain.shutdown(socket.SHUT_WR)
        return moved

    # To the peer ----------------------------------------------------------------------------------

    def _encrypt(self, scratch: memoryview) -> bool:
        if self._plain_ended or self._encrypted:
            return False
        try:
            count = self.plain.recv_into(scratch)
        except BlockingIOError:
            return False
        if not count:
            self._plain_ended = True
            return True
        written = 0
        while written < count:  # A record at a time.
            written += self._cipher.write(scratch[written:count])
        self._fetch()
        return True

    def _fetch(self) -> None:
        if self._to_peer.pending:
            new = self._to_peer.read()
            self._encrypted = memoryview(bytes(self._encrypted) + new if self._encrypted else new)

    def _send(self) -> bool:
        if not self._encrypted:
            return False
        try:
            sent = self.sock.send(self._encrypted)
        except BlockingIOError:
            return False
        self._encrypted = self._encrypted[sent:]
        return True

    def finish(self) -> None:
        """Tell the peer that nothing follows, once all was sent."""
        if self._plain_ended and not self._encrypted:
            with contextlib.suppress(OSError):  # The peer may have ended it meanwhile.
                self.sock.shutdown(socket.SHUT_WR)


class _Carrier:
    """The thread, and the tunnels whose bytes it carries."""

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._tunnels: dict[int, Tunnel] = {}
        """Both descriptors of each -> it."""
        self._waiting: dict[int, int] = {}
        """Descriptor -> the events for which it is registered."""
        self._new: deque[Tunnel] = deque()
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._awake, select.EPOLLIN)
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def carry(self, tunnel: Tunnel) -> None:
        """Callable from any thread."""
        self._new.append(tunnel)
        os.eventfd_write(self._awake, 1)

    def _run(self) -> None:
        due: dict[Tunnel, None] = {}
        while True:
            for descriptor, events in self._epoll.poll(0 if due else None):
                if descriptor == self._awake:
                    os.eventfd_read(self._awake)
                    continue
                tunnel = self._tunnels[descriptor]
                if events & select.EPOLLHUP and descriptor == tunnel.plain.fileno():
                    tunnel.abandoned = True
                due[tunnel] = None
            while self._new:
                tunnel = self._new.popleft()
                self._tunnels[tunnel.sock.fileno()] = tunnel
                self._tunnels[tunnel.plain.fileno()] = tunnel
                due[tunnel] = None
            due = {tunnel: None for tunnel in due if self._work(tunnel)}

    def _work(self, tunnel: Tunnel) -> bool:
        """Return whether it has more to do at once."""
        try:
            more = tunnel.work(self._scratch)
        except OSError as error:  # TLS's errors are of this kind.
            self._drop(tunnel, error)
            return False
        except Exception as error:  # A bug of ours costs this connection, not all of them.
            _log.exception("an encrypted connection failed")
            self._drop(tunnel, error)
            return False
        if tunnel.over:
            self._drop(tunnel, None)
            return False
        tunnel.finish()
        of_sock, of_plain = tunnel.wanted()
        self._wait(tunnel.sock.fileno(), of_sock)
        self._wait(tunnel.plain.fileno(), of_plain)
        return more

    def _wait(self, descriptor: int, events: int | None) -> None:
        before = self._waiting.get(descriptor)
        if events == before:
            return
        if events is None:
            self._epoll.unregister(descriptor)
            del self._waiting[descriptor]
            return
        if before is None:
            self._epoll.register(descriptor, events)
        else:
            self._epoll.modify(descriptor, events)
        self._waiting[descriptor] = events

    def _drop(self, tunnel: Tunnel, why: BaseException | None) -> None:
        for end in (tunnel.sock, tunnel.plain):
            self._wait(end.fileno(), None)
            del self._tunnels[end.fileno()]
        tunnel.end(why)
