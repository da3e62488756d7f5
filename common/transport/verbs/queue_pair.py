"""One reliable-connected queue pair in the event loop.

Requests submitted in one turn of the loop are posted as one list, of which only the last, and every
SIGNAL_EVERYth, asks for a completion: a completion stands for all requests before it, because a
reliable connection completes in order. The queue is armed, drained and armed again by the readable
descriptor of its completion channel; events are acknowledged in lots, and all of them before the
queue is destroyed, which would wait for them forever.

The first request that fails ends the pair: the hardware flushes all that follow.
"""

import asyncio
import os
import secrets
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from slackwater.common.base import limits
from slackwater.common.base.errors import DecodeRejected, SlackwaterError, Unavailable
from slackwater.common.transport.verbs import library as ibv
from slackwater.common.transport.verbs.device import Domain, Exposure, Registration

SIGNAL_EVERY: Final = 32
_POLLED: Final = 32
_ACKNOWLEDGED: Final = 64
_CHAIN: Final = 16
"""Receives that are posted again together."""
_RECEIVES: Final = limits.VERBS_MESSAGES + limits.VERBS_CREDIT_MESSAGES
_RECEIVE_ID: Final = 0
_INLINE_BYTES: Final = 220
_ACK_TIMEOUT: Final = 16
"""4.096 us * 2^16 = 268 ms, eight times: a peer whose NIC is gone is noticed in a few seconds."""
_RETRIES: Final = 7
_FOREVER: Final = 7
"""The number of receiver-not-ready retries that means no end: the channel notices a stall."""
_READY_WAIT: Final = 12
"""0.64 ms between them."""
_HOPS: Final = 64
_EVENT_LINK: Final = "infinibandevent"
_making = threading.Lock()
"""One completion channel at a time: several Agents of a process have event loops of their own."""


class EndPoint(NamedTuple):
    """The facts that one side must know of the other's queue pair."""

    number: int
    sequence: int
    lid: int
    mtu: int
    link: int
    reads: int
    gid: str

    def pack(self) -> bytes:
        return _END_POINT.pack(*self[:6], self.gid.encode())


_END_POINT: Final = struct.Struct("<IIHBBB39s")
END_POINT_BYTES: Final = _END_POINT.size


def unpack_end_point(data: bytes) -> EndPoint:
    """Raises DecodeRejected."""
    if len(data) != END_POINT_BYTES:
        raise DecodeRejected(f"a queue pair described in {len(data)} bytes, not {END_POINT_BYTES}")
    number, sequence, lid, mtu, link, reads, gid = _END_POINT.unpack(data)
    if not 1 <= mtu <= 5 or not reads:
        raise DecodeRejected(f"a queue pair with MTU code {mtu} and {reads} reads")
    return EndPoint(number, sequence, lid, mtu, link, reads, gid.decode("ascii", "replace"))


class Work:
    """A request on its way through the pair."""

    __slots__ = ("number", "request")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.number = 0

    def settle(self, error: SlackwaterError | None) -> None:
        """Note that the request was completed (None), or has failed. May be called again."""


class WorkWithCallback(Work):
    """A request whose completion, and only that, is told."""

    __slots__ = ("_completed",)

    def __init__(self, request: Any, completed: Callable[[], None]) -> None:
        super().__init__(request)
        self._completed = completed

    def settle(self, error: SlackwaterError | None) -> None:
        if error is None:
            self._completed()


class _Bind(Work):
    __slots__ = ("done",)

    def __init__(self, request: Any, done: "asyncio.Future[None]") -> None:
        super().__init__(request)
        self.done = done

    def settle(self, error: SlackwaterError | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)


class QueuePair:
    """`received` gets the immediate word of each message, in order; `failed` the status that ended
    the pair and the request it happened to, if it was one of ours."""

    def __init__(
        self,
        domain: Domain,
        local_ip: str,
        received: Callable[[int], None],
        failed: Callable[[int, Work | None], None],
    ) -> None:
        """Raises Unavailable where the device has no resources left."""
        self.domain = domain
        self._library = library = domain.device.library
        self._received, self._failed = received, failed
        self._loop = asyncio.get_running_loop()
        self._batch: list[Work] = []
        self._posted: deque[Work] = deque()
        self._number = 0
        self._scheduled = self._broken = self.closed = False
        self._spent = self._unacknowledged = 0
        self._completions = self._seen = self._idle_ticks = 0
        self._gid = domain.device.gid(local_ip)
        self._sequence = secrets.randbelow(1 << 24)
        made: list[ibv.Closable] = []
        try:
            self._events, self._fd = _event_channel(domain)
            made.append(self._events)
            depth = domain.device.sends + _RECEIVES + 1
            self._queue = library.CompletionQueue(
                domain.device.context, depth, None, self._events, 0
            )
            made.append(self._queue)
            self._pair, self.inline_bytes = self._make()
        except library.Error as error:
            for each in reversed(made):
                each.close()
            raise Unavailable(f"{domain.device.name} has no queue pair left: {error}") from error

    def _make(self) -> tuple[ibv.NativePair, int]:
        library, device = self._library, self.domain.device
        capacities = library.Capacities(
            max_send_wr=device.sends,
            max_recv_wr=_RECEIVES,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=_INLINE_BYTES,
        )
        wanted = library.InitAttributes(
            qp_type=ibv.RELIABLE_CONNECTION, scq=self._queue, rcq=self._queue, cap=capacities
        )
        return library.QueuePair(self.domain.handle, wanted), int(wanted.max_inline_data)

    # Connecting -----------------------------------------------------------------------------------

    def end_point(self) -> EndPoint:
        device = self.domain.device
        return EndPoint(
            self._pair.qp_num,
            self._sequence,
            device.state.lid,
            device.mtu,
            device.state.link_layer,
            device.reads,
            self._gid.text,
        )

    def connect(self, peer: EndPoint, landing: Registration) -> None:
        """To `peer`, ready to send and receive. `landing`: any memory; messages carry no bytes of
        their own, and the library wants a place for them. Raises Unavailable."""
        library, device = self._library, self.domain.device
        if peer.link != device.state.link_layer:
            raise Unavailable("one side's link is InfiniBand, the other's Ethernet")
        try:
            attributes = library.Attributes(port_num=device.port.number)
            attributes.qp_access_flags = ibv.LOCAL_WRITE | ibv.REMOTE_WRITE | ibv.REMOTE_READ
            self._pair.to_init(attributes)
            self._post_receives(landing)
            attributes.dest_qp_num = peer.number
            attributes.rq_psn, attributes.sq_psn = peer.sequence, self._sequence
            attributes.path_mtu = min(device.mtu, peer.mtu)
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = min(device.reads, peer.reads)
            attributes.min_rnr_timer, attributes.timeout = _READY_WAIT, _ACK_TIMEOUT
            attributes.retry_cnt, attributes.rnr_retry = _RETRIES, _FOREVER
            attributes.ah_attr = self._handle(peer)
            self._pair.to_rts(attributes)
            self._queue.req_notify()
        except library.Error as error:
            raise Unavailable(
                f"{device.name} cannot reach {peer.gid} from {self._gid.text}: {error}"
            ) from error
        self._loop.add_reader(self._fd, self._on_event)

    def _handle(self, peer: EndPoint) -> Any:
        library, device = self._library, self.domain.device
        if device.state.link_layer == ibv.INFINIBAND_LINK:
            return library.Handle(dlid=peer.lid, is_global=0, port_num=device.port.number)
        route = library.Route(
            dgid=library.Gid(peer.gid), sgid_index=self._gid.index, hop_limit=_HOPS
        )
        return library.Handle(gr=route, is_global=1, port_num=device.port.number)

    def _post_receives(self, landing: Registration) -> None:
        """A chain is built once: posting copies it."""
        chain: Any = None
        self._chain: list[Any] = []
        for _ in range(_CHAIN):
            piece = self._library.Piece(landing.address, 0, landing.lkey)
            request = self._library.ReceiveRequest(
                wr_id=_RECEIVE_ID, num_sge=1, sg=[piece], next_wr=chain
            )
            self._chain.append(request)
            chain = request
        for _ in range(_RECEIVES // _CHAIN):
            self._pair.post_recv(chain)

    # Requests -------------------------------------------------------------------------------------

    def rdma(
        self,
        opcode: int,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        *,
        immediate: int = 0,
        inline: bool = False,
    ) -> Any:
        """A request over (address, bytes, lkey) here and (address, rkey) there."""
        request = self._library.SendRequest(
            opcode=opcode,
            num_sge=1,
            sg=[self._library.Piece(*local)],
            imm_data=immediate,
            send_flags=ibv.INLINE if inline else 0,
        )
        request.set_wr_rdma(remote[1], remote[0])
        return request

    def submit(self, work: Work) -> None:
        """Post at the end of this turn of the loop. The caller bounds how many are under way."""
        if self.closed:
            work.settle(Unavailable("the queue pair was closed"))
            return
        self._batch.append(work)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._post)

    async def expose(self, of: Registration, address: int, nbytes: int, rights: int) -> Exposure:
        """Let the peer reach this range. Raises Unavailable, Rejected."""
        if not self.domain.device.windows:
            return self.domain.expose_alone(of, address, nbytes, rights)
        library = self._library
        try:
            window = library.Window(self.domain.handle, ibv.WINDOW_TYPE_2)
        except library.Error as error:
            raise Unavailable(f"{self.domain.device.name} has no window left: {error}") from error
        request = library.SendRequest(opcode=ibv.BIND_WINDOW)
        request.set_bind_wr(window, library.WindowBinding(of.keys, address, nbytes, rights))
        exposure = Exposure(request.rkey, address, window, of)
        bind = _Bind(request, self._loop.create_future())
        self.submit(bind)
        try:
            await bind.done
        except BaseException:
            exposure.close()
            raise
        return exposure

    def _post(self) -> None:
        self._scheduled = False
        if self.closed or self._broken or not self._batch:
            return  # Waiting requests are settled when the pair closes.
        works, self._batch = self._batch, []
        following: Any = None
        for work in works:
            self._number += 1
            work.number = self._number
        for work in reversed(works):
            request = work.request
            request.wr_id = work.number
            if following is None or work.number % SIGNAL_EVERY == 0:
                request.send_flags |= ibv.SIGNALED
            if following is not None:
                request.next_wr = following
            following = request
        self._posted.extend(works)
        try:
            self._pair.post_send(following)
        except self._library.Error:
            self._fail(ibv.LOCAL_PAIR, works[0])

    # Completions ----------------------------------------------------------------------------------

    def _on_event(self) -> None:
        try:
            self._events.get_cq_event(self._queue)
        except self._library.Error:
            return  # Readable, and yet nothing there: the descriptor does not block.
        self._unacknowledged += 1
        if self._unacknowledged >= _ACKNOWLEDGED:
            self._queue.ack_events(self._unacknowledged)
            self._unacknowledged = 0
        self._queue.req_notify()
        self.drain()

    def drain(self) -> None:
        """Take the completions that are there."""
        while not self.closed:
            count, completions = self._queue.poll(_POLLED)
            for completion in completions:
                if not self._complete(completion):
                    return
            if count < _POLLED:
                return

    def _complete(self, completion: ibv.Completion) -> bool:
        """False once the pair is closed."""
        self._completions += 1
        number, good = completion.wr_id, completion.status == ibv.SUCCESS
        if number != _RECEIVE_ID:
            while self._posted and self._posted[0].number < number + good:
                self._posted.popleft().settle(None)
        if not good:
            self._fail(completion.status, self._posted[0] if self._posted and number else None)
        elif number == _RECEIVE_ID:
            self._receive(completion.imm_data)
        return not self.closed

    def _receive(self, word: int) -> None:
        self._spent += 1
        if self._spent == _CHAIN:
            self._spent = 0
            self._pair.post_recv(self._chain[-1])
        self._received(word)

    def _fail(self, status: int, work: Work | None) -> None:
        if not self._broken and not self.closed:
            self._broken = True
            self._failed(status, work)

    def idle_ticks(self, waiting: bool) -> int:
        """Count idle ticks like Stream: ticks in a row without a completion although one is
        awaited."""
        if self._completions != self._seen or not (waiting or self._posted):
            self._seen, self._idle_ticks = self._completions, 0
        else:
            self._idle_ticks += 1
        return self._idle_ticks

    # The end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Answer no access any more. What is under way fails at both ends."""
        if not self.closed and not self._broken:
            self._broken = True
            attributes = self._library.Attributes(qp_state=ibv.STATE_ERROR)
            try:
                self._pair.modify(attributes, ibv.STATE_MASK)
            except self._library.Error:
                return  # It never was connected, or the device is gone: the same.

    def close(self, error: SlackwaterError) -> None:
        """Destroy it: from now on the NIC touches no memory on its behalf. What was under way is
        settled with `error`. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        if self._unacknowledged:
            self._queue.ack_events(self._unacknowledged)
        self._pair.close()
        self._queue.close()
        with _making:  # Its number may not come back while another looks for a new one.
            self._events.close()
        works = [*self._posted, *self._batch]
        self._posted.clear()
        self._batch.clear()
        for work in works:
            work.settle(error)


def _event_channel(domain: Domain) -> tuple[ibv.EventChannel, int]:
    """A completion channel and its descriptor, which pyverbs before 57 does not tell: it is the one
    that appears."""
    with _making:
        before = _event_descriptors()
        channel = domain.device.library.EventChannel(domain.device.context)
        descriptor = getattr(channel, "fd", None)
        if descriptor is None:
            [descriptor] = _event_descriptors() - before
    os.set_blocking(descriptor, False)
    return channel, descriptor


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if _EVENT_LINK in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except FileNotFoundError:
            continue  # The listing's own, or closed by a thread.
    return found
