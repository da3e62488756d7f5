"""The process that watches what jobs send: it looks, says what recurs, and may do nothing else.

It is a program of its own (`python -m slackwater.services.worker.traffic_program`), one a node,
which opens what needs privileges and then gives them up. Its worker service tells it on stdin
which ports and processes are whose (`Orders`, a JSON line), and reads on stdout, as JSON lines,
first what it may watch (`Able`), then what it found (`Finding`). It ends when stdin does.

It watches in windows of ITERATIONS iterations, at most WINDOW_S, which come less often the longer
it knows the ranks. Where segments are small each is followed by a pause of five times its length,
since a packet costs as much however small it is.
Memory is bounded: by the ring's bursts, CALLS_MAX calls, and SEGMENTS_MAX segments that are looked
into for gloo's headers.
"""

import contextlib
import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

import msgspec

from slackwater.common.base.errors import Unavailable
from slackwater.common.domains.traffic.estimate import estimate
from slackwater.common.domains.traffic.gloo import GlooStream, all_reduced
from slackwater.common.domains.traffic.recurring import Recurrence, flow_of, recurrence
from slackwater.common.native.packet_ring import (
    HEADERS_BYTES,
    PORTS_MAX,
    WHOLE_BYTES,
    Endpoints,
    PacketRing,
    run_as_nobody,
)
from slackwater.common.native.send_calls import SendCalls, mount_tracefs
from slackwater.services.worker.traffic_talk import Able, Finding, Orders, Target

ITERATIONS: Final = 20
WINDOW_S: Final = 60.0
FIRST_LOOK_S: Final = 2.0
REST_S, REST_S_MAX = 2.0, 256.0
"""Rests between windows get longer, as long as no rank is new."""
PAUSE: Final = 5.0
SMALL_BYTES: Final = 8192
"""Mean bytes of a segment below which pauses are made."""
GLOO_ITERATIONS: Final = 6
GLOO_S_MIN, GLOO_S_MAX = 1.0, 15.0
SEGMENTS_MAX: Final = 200_000
CALLS_MAX: Final = 1 << 16
_POLL_S: Final = 0.2
_READ_BYTES: Final = 1 << 20


class Inbox:
    """Reads orders; the last one counts. Raises EOFError once nobody can send any more."""

    def __init__(self, fd: int) -> None:
        self._fd, self._part = fd, b""
        self.orders = Orders()
        os.set_blocking(fd, False)

    def wait(self, timeout_s: float) -> None:
        """Wait so long for orders."""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return
        came = os.read(self._fd, _READ_BYTES)
        if not came:
            raise EOFError
        *lines, self._part = (self._part + came).split(b"\n")
        if lines:
            self.orders = msgspec.json.decode(lines[-1], type=Orders)


class Watcher:
    """Watches in windows, with a ring, with calls, or both."""

    def __init__(self, ring: PacketRing | None, calls: SendCalls | None, inbox: Inbox) -> None:
        self._ring, self._calls, self._inbox = ring, calls, inbox
        self._seen: dict[str, int] = {}
        """Iterations by rank, of all windows."""
        self._without_gloo: set[str] = set()

    def window(self, targets: Collection[Target]) -> tuple[list[Finding], bool]:
        """Watch one window. Return what recurs, and whether segments were small."""
        begun_s, used_s = time.monotonic(), time.process_time()
        dropped = self._ring.count_dropped() if self._ring else 0
        estimates = self._estimated(targets)
        small = self._ring is not None and _small(self._ring)
        buckets = self._buckets(targets, estimates)
        cpu = (time.process_time() - used_s) / (time.monotonic() - begun_s)
        if self._ring:
            dropped = self._ring.count_dropped() - dropped
        found = []
        for target in targets:
            flows, calls, _ = estimates[target.key]
            traffic = estimate(flows, calls, buckets.get(target.key, []))
            if traffic is None:
                continue
            seen = self._seen.get(target.key, 0) + traffic.iterations
            self._seen[target.key] = seen
            traffic = msgspec.structs.replace(
                traffic, iterations=seen, windows=small, dropped=dropped
            )
            found.append(Finding(target.key, traffic, 100 * cpu))
        return found, small

    def forget(self, keys: Collection[str]) -> None:
        """Keep in mind what concerns these alone."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in keys}
        self._without_gloo &= set(keys)

    def _estimated(self, targets: Collection[Target]) -> dict[str, "Estimated"]:
        """Watch headers and calls until each rank's iterations are seen."""
        called: dict[str, dict[int, list[int]]] = {t.key: defaultdict(list) for t in targets}
        owner = {pid: target.key for target in targets for pid in target.pids}
        self._begin([port for target in targets for port in target.ports], HEADERS_BYTES)
        begun_s, calls = time.monotonic(), 0
        look_s = begun_s + FIRST_LOOK_S
        while True:
            self._inbox.wait(0.0)
            calls += self._read(called, owner, CALLS_MAX - calls)
            now_s = time.monotonic()
            over = now_s - begun_s > WINDOW_S or (self._ring is not None and self._ring.full)
            if now_s < look_s and not over:
                continue
            found = {t.key: self._look(t, called[t.key]) for t in targets}
            if over or all(each[2] >= ITERATIONS for each in found.values()):
                self._end()
                return found
            look_s = now_s + max(FIRST_LOOK_S, (now_s - begun_s) / 2)

    def _begin(self, ports: list[int], snap_bytes: int) -> None:
        if self._ring:
            self._ring.clear()
            self._ring.choose(snap_bytes, ports[:PORTS_MAX])
        if self._calls and snap_bytes == HEADERS_BYTES:
            self._calls.enable()

    def _end(self) -> None:
        if self._calls:
            self._calls.disable()
        if self._ring:
            self._ring.choose(0, ())

    def _read(
        self, called: dict[str, dict[int, list[int]]], owner: dict[int, str], room: int
    ) -> int:
        """Take in what came. Return the number of calls of the ranks'."""
        count = 0
        if self._ring:
            self._ring.read(_POLL_S)
        else:
            time.sleep(_POLL_S)
        for call in self._calls.read() if self._calls else ():
            key = owner.get(call.pid)
            if key is not None and count < room:
                called[key][call.socket].append(call.nbytes)
                count += 1
        return count

    def _look(self, target: Target, calls: dict[int, list[int]]) -> "Estimated":
        flows = list(self._recurrences(target))
        found = estimate(flows, calls, ())
        return flows, calls, found.iterations if found else 0

    def _recurrences(self, target: Target) -> Iterator[Recurrence]:
        if not self._ring:
            return
        bursts = self._ring.bursts()
        for number, ends in self._ring.flows().items():
            if ends.source_port in target.ports:
                own = bursts[bursts[:, 2] == number]
                if len(own) and (found := recurrence(flow_of(own))):
                    yield found

    def _buckets(
        self, targets: Collection[Target], estimates: dict[str, "Estimated"]
    ) -> dict[str, list[int]]:
        """Look for gloo's headers in whole packets of what may be rings, for some iterations."""
        asked = [
            target
            for target in targets
            if target.key not in self._without_gloo
            and any(flow.both_ways for flow in estimates[target.key][0])
        ]
        if not self._ring or not asked:
            return {}
        longest_s = max(flow.iteration_s for t in asked for flow in estimates[t.key][0])
        lasting_s = min(max(GLOO_S_MIN, GLOO_ITERATIONS * longest_s), GLOO_S_MAX)
        self._begin([port for target in asked for port in target.ports], WHOLE_BYTES)
        streams = self._streams(lasting_s)
        self._end()
        found = {}
        for target in asked:
            messages = [
                message
                for ends, stream in streams.items()
                if ends.source_port in target.ports
                for message in stream.messages
            ]
            found[target.key] = all_reduced(messages, target.workers)
            if not messages:
                self._without_gloo.add(target.key)
        return found

    def _streams(self, lasting_s: float) -> dict[Endpoints, GlooStream]:
        assert self._ring is not None
        streams: dict[Endpoints, GlooStream] = defaultdict(GlooStream)
        until_s, segments = time.monotonic() + lasting_s, 0
        while time.monotonic() < until_s and segments < SEGMENTS_MAX:
            for segment in self._ring.segments(_POLL_S):
                streams[segment.endpoints].feed(segment.ns, segment.seq, segment.payload)
                segments += 1
        return streams


Estimated = tuple[list[Recurrence], dict[int, list[int]], int]
"""Flows and calls of a rank, and how many iterations they show."""


def rest_s(lasted_s: float, small: bool, windows: int) -> float:
    """Return how long to rest after a window that lasted so long, and came after so many others of
    the same ranks: they say the same again."""
    least_s = min(REST_S_MAX, REST_S * 2.0 ** min(windows, 60))
    return max(least_s, PAUSE * lasted_s) if small else least_s


def _small(ring: PacketRing) -> bool:
    packets, nbytes = ring.seen
    return nbytes < SMALL_BYTES * packets


def _opened() -> tuple[PacketRing | None, SendCalls | None, Able]:
    ring: PacketRing | None = None
    calls: SendCalls | None = None
    reasons = {"packets": "", "calls": ""}
    try:
        ring = PacketRing()
    except Unavailable as error:
        reasons["packets"] = str(error)
    try:
        mount_tracefs()
        calls = SendCalls()
    except Unavailable as error:
        reasons["calls"] = str(error)
    return ring, calls, Able(**reasons)


def _say(what: Able | Finding) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Watch until the worker service ends."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        _watch()


def _watch() -> None:
    ring, calls, able = _opened()
    run_as_nobody()
    _say(able)
    if ring is None and calls is None:
        return
    inbox = Inbox(sys.stdin.fileno())
    watcher = Watcher(ring, calls, inbox)
    known: set[str] = set()
    windows = 0
    while True:
        targets = inbox.orders.targets
        keys = {target.key for target in targets}
        windows = windows + 1 if keys <= known else 0
        known, begun_s = keys, time.monotonic()
        found, small = watcher.window(targets) if targets else ([], False)
        for each in found:
            _say(each)
        watcher.forget(keys)
        now_s = time.monotonic()
        until_s = now_s + rest_s(now_s - begun_s, small, windows)
        while (left_s := until_s - time.monotonic()) > 0.0:
            inbox.wait(left_s)
            if any(target.key not in keys for target in inbox.orders.targets):
                break


if __name__ == "__main__":
    main()
