"""Peers that aggregation.py compares with: gloo (all_reduce, with torch's fused SGD, through one
server process) and the simplest servers in Python, over shared memory and over TCP.

Each process is started by aggregation.py, reads `MODE REPETITIONS` lines, and answers each with
the instants at which it began and ended. This file needs numpy alone, and torch for gloo, so that
another interpreter than ours may run it.

    python benchmarks/aggregation_peers.py ROLE FOLDER RANK WORKERS ELEMENTS
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 64 * 1024
"""Elements that the naive server over shared memory adds at a time: the sum stays in the cache."""
PIECE = 256 * 1024
"""Elements that the naive server over TCP receives at a time."""

Work = Callable[[str, int], None]


def obey(work: Work) -> None:
    """Do what the lines on stdin say, until they end."""
    print("ready", flush=True)
    for line in sys.stdin:
        mode, repetitions = line.split()
        begun_s = time.perf_counter()
        work(mode, int(repetitions))
        print(f"{begun_s!r} {time.perf_counter()!r}", flush=True)


def mapped(folder: Path, name: str, elements: int) -> Any:
    """Shared memory, every page of it touched."""
    with open(folder / name, "a+b") as file:
        os.posix_fallocate(file.fileno(), 0, 4 * elements)
    array: Any = np.memmap(folder / name, np.float32, "r+", shape=(elements,))
    array.reshape(-1)[::1024] += np.float32(0.0)
    return np.asarray(array)


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    for _ in range(3000):
        try:
            sock.connect(str(path))
            return sock
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)
    raise TimeoutError(f"nobody listens at {path}")


# The naive server over shared memory --------------------------------------------------------------


def shm_server(folder: Path, workers: int, elements: int) -> None:
    slots = [mapped(folder, f"slot{rank}", elements) for rank in range(workers)]
    result = mapped(folder, "result", elements)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "shm"))
    listener.listen(workers)
    clients = [listener.accept()[0] for _ in range(workers)]
    while all(client.recv(1) for client in clients):
        for first in range(0, elements, BLOCK):
            part = slice(first, first + BLOCK)
            total = result[part]
            if workers == 1:
                np.copyto(total, slots[0][part])
            else:
                np.add(slots[0][part], slots[1][part], out=total)
            for slot in slots[2:]:
                np.add(total, slot[part], out=total)
        for client in clients:
            client.send(b"k")


def shm_worker(folder: Path, rank: int, workers: int, elements: int) -> None:
    slot = mapped(folder, f"slot{rank}", elements)
    gradient = np.ones(elements, np.float32)
    np.copyto(slot, gradient)
    sock = connected(folder / "shm")
    result = mapped(folder, "result", elements)

    def work(mode: str, repetitions: int) -> None:
        for _ in range(repetitions):
            if mode == "copy":
                np.copyto(slot, gradient)
            sock.send(b"g")
            sock.recv(1)
        assert result[0] == result[-1] == workers

    obey(work)


# The naive server over TCP ------------------------------------------------------------------------


def take(sock: socket.socket, into: memoryview) -> bool:
    """Fill it; False: the peer is gone."""
    got = 0
    while got < len(into):
        count = sock.recv_into(into[got : got + 4 * PIECE])
        if not count:
            return False
        got += count
    return True


def tcp_server(folder: Path, workers: int, elements: int) -> None:
    """A thread a worker: receive a piece, add it, and send the sum when all have given theirs."""
    listener = socket.create_server(("127.0.0.1", 0))
    (folder / "port.new").write_text(str(listener.getsockname()[1]))
    (folder / "port.new").replace(folder / "port")
    total = np.zeros(elements, np.float32)
    pieces = range(0, elements, PIECE)
    begun = np.zeros(len(pieces), bool)
    locks = [threading.Lock() for _ in pieces]
    everybody = threading.Barrier(workers)

    def serve(sock: socket.socket) -> None:
        buffer = np.empty(PIECE, np.float32)
        view = memoryview(buffer).cast("B")
        while True:
            for number, first in enumerate(pieces):
                part = total[first : first + PIECE]
                if not take(sock, view[: part.nbytes]):
                    everybody.abort()
                    return
                with locks[number]:
                    if begun[number]:
                        np.add(part, buffer[: part.size], out=part)
                    else:
                        np.copyto(part, buffer[: part.size])
                        begun[number] = True
            if everybody.wait() == 0:
                begun[:] = False
            everybody.wait()
            sock.sendall(memoryview(total).cast("B"))
            everybody.wait()

    def serve_until_gone(sock: socket.socket) -> None:
        try:
            serve(sock)
        except (threading.BrokenBarrierError, ConnectionError):
            return

    threads = []
    for _ in range(workers):
        sock = listener.accept()[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threads.append(threading.Thread(target=serve_until_gone, args=(sock,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tcp_worker(folder: Path, rank: int, workers: int, elements: int) -> None:
    while not (folder / "port").exists():
        time.sleep(0.01)
    sock = socket.create_connection(("127.0.0.1", int((folder / "port").read_text())))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient, result = np.ones(elements, np.float32), np.zeros(elements, np.float32)

    def work(mode: str, repetitions: int) -> None:
        for _ in range(repetitions):
            sock.sendall(memoryview(gradient).cast("B"))
            if not take(sock, memoryview(result).cast("B")):
                raise EOFError("the naive server is gone")
        assert result[0] == result[-1] == workers

    obey(work)


# gloo ---------------------------------------------------------------------------------------------


def gloo(folder: Path, rank: int, workers: int, elements: int) -> None:
    """Ranks 0 to workers - 1 are workers, the last one is the server of the `server` mode."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=workers + 1
    )
    group = dist.new_group(list(range(workers)))
    is_server = rank == workers
    tensor = torch.full((elements,), 0.0)  # Sums of sums of anything else would overflow.
    parameter = torch.nn.Parameter(torch.full((1 if is_server else elements,), 0.0))
    if not is_server:
        parameter.grad = tensor
    optimizer = torch.optim.SGD([parameter], lr=1e-4, momentum=0.9, fused=True)

    def work(mode: str, repetitions: int) -> None:
        for _ in range(repetitions):
            if mode == "server":
                dist.reduce(tensor, dst=workers)
                dist.broadcast(tensor, src=workers)
            elif not is_server:
                dist.all_reduce(tensor, group=group)
                if mode == "sgd":
                    optimizer.step()

    obey(work)
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) != 6:
        print("started by aggregation.py; alone it measures nothing")
        return
    role, folder, rank, workers, elements = sys.argv[1:6]
    place, count, size = Path(folder), int(workers), int(elements)
    match role:
        case "shm-server":
            shm_server(place, count, size)
        case "shm-worker":
            shm_worker(place, int(rank), count, size)
        case "tcp-server":
            tcp_server(place, count, size)
        case "tcp-worker":
            tcp_worker(place, int(rank), count, size)
        case "gloo":
            gloo(place, int(rank), count, size)
        case _:
            raise SystemExit(f"unknown role {role}")


if __name__ == "__main__":
    main()
