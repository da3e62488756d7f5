"""Measure what it costs to watch a host's packets: a ring beside one system call a packet.

One TCP stream between two network namespaces: segments as a host with offload sees them (to
64 KiB), and as they are on a wire (1,448 bytes), which are also watched in windows, a sixth of the
time. A figure is the watcher's processor time, in per cent of a core for each Gbit/s that flows.
Beside it, the same stream is read with one `recv` a packet in Python.

    python benchmarks/packet_ring.py [--seconds 10] [--json FILE]            (as root)
"""

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Skipped, show, this_command, write_json
from namespaces import Machine, in_a_namespace, machines, sh

from slackwater.common.native.packet_ring import HEADERS_BYTES, PacketRing, run_as_nobody

RATE_MBIT = 4000
PORT = 5100
WINDOW_S, PAUSE_S = 1.0, 5.0
CHUNK = 1 << 20
GOALS = {"64 KiB": 0.5, "1,448 bytes": 12.0, "1,448 bytes, in windows": 2.0}
"""Per cent of a core for each Gbit/s."""


def send(address: str, seconds: float) -> None:
    chunk = bytes(CHUNK)
    sent, until_s = 0, time.monotonic() + seconds
    with socket.create_connection((address, PORT)) as stream:
        while time.monotonic() < until_s:
            stream.sendall(chunk)
            sent += CHUNK
        stream.shutdown(socket.SHUT_WR)
        stream.recv(1)
    print(sent, flush=True)


def receive() -> None:
    into = bytearray(CHUNK)
    with socket.create_server(("", PORT)) as listener:
        print("ready", flush=True)
        stream, _ = listener.accept()
        with stream:
            while stream.recv_into(into):
                pass


def phases(in_windows: bool, stopped: list[bool]) -> Iterator[bool]:
    """Yield whether to watch, until stopped: always, or in windows."""
    begun_s = time.monotonic()
    while not stopped:
        into_s = (time.monotonic() - begun_s) % (WINDOW_S + PAUSE_S)
        yield not in_windows or into_s < WINDOW_S


def watch(way: str) -> None:
    """Watch until SIGTERM; then print processor seconds, packets, bytes and what was dropped."""
    stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    if way == "recv":
        watch_by_recv(stopped)
        return
    ring = PacketRing(socket.if_nametoindex("nic"))
    run_as_nobody()
    print("ready", flush=True)
    begun_s, watched, packets, nbytes = cpu_s(), False, 0, 0
    for on in phases(way == "windows", stopped):
        if on != watched:
            ring.choose(HEADERS_BYTES if on else 0, ())
            watched = on
        ring.read(0.2)
        if len(ring.bursts()) > 10_000:
            packets, nbytes = packets + ring.seen[0], nbytes + ring.seen[1]
            ring.clear()
    while ring.read(0.1):
        pass
    used_s = cpu_s() - begun_s
    print(json.dumps([used_s, packets + ring.seen[0], nbytes + ring.seen[1], ring.count_dropped()]))


def watch_by_recv(stopped: list[bool]) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)) as packets:
        packets.settimeout(0.2)
        packets.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
        packets.bind(("nic", 3))
        into, count, nbytes = bytearray(HEADERS_BYTES), 0, 0
        print("ready", flush=True)
        begun_s = cpu_s()
        while not stopped:
            try:
                _, _, _, address = packets.recvmsg_into([into])
            except TimeoutError:
                continue
            header = (into[0] & 15) * 4
            length = int.from_bytes(into[2:4]) - header - (into[header + 12] >> 4) * 4
            if address[2] == socket.PACKET_OUTGOING and length > 0:
                count, nbytes = count + 1, nbytes + length
        dropped = int.from_bytes(packets.getsockopt(263, 6, 8)[4:], sys.byteorder)
        print(json.dumps([cpu_s() - begun_s, count, nbytes, dropped]))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def part(machine: Machine, *words: str) -> subprocess.Popen[str]:
    command = machine.command(sys.executable, __file__, *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def one(ends: dict[str, Machine], way: str, seconds: float) -> tuple[float, str]:
    """Return per cent of a core for each Gbit/s, and what else was seen."""
    sender, receiver = ends["sender"], ends["receiver"]
    watcher = part(sender, "watch", way)
    line(watcher)
    receiving = part(receiver, "receive")
    line(receiving)
    sent = int(line(part(sender, "send", receiver.address, str(seconds))))
    receiving.wait(30)
    time.sleep(0.2)
    watcher.send_signal(signal.SIGTERM)
    used_s, packets, nbytes, dropped = json.loads(line(watcher))
    gbit = sent * 8e-9
    said = f"{gbit / seconds:.2f} Gbit/s, {packets} packets, {nbytes / sent:.4f} of the bytes seen"
    return 100 * used_s / gbit, f"{said}, {dropped} dropped"


def measure(seconds: float, out: Path | None) -> None:
    figures: list[Figure | Skipped] = []
    with machines(RATE_MBIT, "sender", "receiver") as ends:
        for segments in ("64 KiB", "1,448 bytes"):
            if segments != "64 KiB":
                for machine in ends.values():
                    sh(*machine.command("ip", "link", "set", "nic", "gso_max_segs", "1"))
            peer, said = one(ends, "recv", min(seconds, 5.0))
            print(f"{segments}, one recv a packet: {said}")
            ways = {"ring": segments}
            if segments != "64 KiB":
                ways["windows"] = f"{segments}, in windows"
            for way, name in ways.items():
                lasting_s = seconds if way == "ring" else 2 * (WINDOW_S + PAUSE_S)
                found, said = one(ends, way, lasting_s)
                print(f"{name}: {said}")
                unit = "% of a core per Gbit/s"
                limit = f"{name}: at most {GOALS[name]:g} (our limit)"
                figures.append(
                    Figure(limit, found, GOALS[name], unit, "limit", 1.0, lower_is_better=True)
                )
                figures.append(
                    Figure(name, found, peer, unit, "one recv a packet", lower_is_better=True)
                )
    show("Watching packets", figures)
    if out:
        write_json(out, this_command(), figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    match sys.argv[1:]:
        case ["send", address, seconds]:
            send(address, float(seconds))
        case ["receive"]:
            receive()
        case ["watch", way]:
            watch(way)
        case _:
            options = parser.parse_args()
            if os.geteuid():
                print("namespaces and packets need root", file=sys.stderr)
                return 1
            return in_a_namespace(sys.argv[1:], lambda: measure(options.seconds, options.json))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
