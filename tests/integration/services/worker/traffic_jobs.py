"""Jobs that nobody adapted, whose traffic tests watch: parameter servers on plain sockets, DDP.

    traffic_jobs.py server ADDRESS_FILE SIZES SERVERS NUMBER WORKERS ITERATIONS
    traffic_jobs.py worker ADDRESS_FILE SIZES SERVERS NUMBER WORKERS ITERATIONS
    traffic_jobs.py ranks ADDRESS_FILE SIZES             (ranks 0 and 1: workers, 2 and 3: servers)
    traffic_jobs.py ddp SIZES ITERATIONS OUT                        (with torchrun's variables)

SIZES are bytes of tensors, with commas. Computing is slept. A worker writes when its
iterations began beside ADDRESS_FILE, a rank of DDP writes that and its buckets to OUT.
"""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

COMPUTE_S = 0.1


def take(stream: socket.socket) -> None:
    left = struct.unpack("Q", stream.recv(8, socket.MSG_WAITALL))[0]
    into = bytearray(1 << 20)
    while left:
        left -= stream.recv_into(into, min(left, len(into)))


def give(stream: socket.socket, size: int) -> None:
    stream.sendall(struct.pack("Q", size))
    stream.sendall(bytes(size))


def write(path: Path, what: object) -> None:
    """Write a file that others wait for, as a whole."""
    made = Path(f"{path}.new")
    made.write_text(json.dumps(what))
    made.rename(path)


def together(target: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    threads = [threading.Thread(target=target, args=(each,)) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve(own: list[int], address: Path, workers: int, iterations: int) -> None:
    all_in = threading.Barrier(workers)

    def one(stream: socket.socket) -> None:
        for _ in range(iterations):
            for _ in own:
                take(stream)
            all_in.wait(60)
            for size in own:
                give(stream, size)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        write(address, listener.getsockname()[1])
        together(one, [listener.accept()[0] for _ in range(workers)])


def work(owned: list[list[int]], addresses: list[Path], iterations: int, out: Path) -> None:
    for address in addresses:
        while not address.exists():
            time.sleep(0.02)
    ports = [int(address.read_text()) for address in addresses]
    streams = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    order = [(number, size) for number, own in enumerate(owned) for size in reversed(own)]
    began = []
    for _ in range(iterations):
        began.append(time.monotonic())
        time.sleep(COMPUTE_S / 3)
        for number, size in order:
            time.sleep(COMPUTE_S * 2 / 3 / len(order))
            give(streams[number], size)
        pairs = [(streams[number], own) for number, own in enumerate(owned)]
        together(lambda pair: [take(pair[0]) for _ in pair[1]], pairs)
    written = {"began": [*began, time.monotonic()], "buckets": []}
    write(out, written)


def ddp(sizes: list[int], iterations: int, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [torch.nn.Parameter(torch.zeros(size // 4)) for size in sizes]
            self.tensors = torch.nn.ParameterList(made)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(COMPUTE_S)
            for tensor in self.tensors:
                x = x + tensor.sum() * 1e-6
            return x

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(Sum(), bucket_cap_mb=2)
    began = []
    for _ in range(iterations):
        began.append(time.monotonic())
        model.zero_grad()
        model(torch.ones(1)).sum().backward()
        if dist.get_rank() == 0:
            said = model._get_ddp_logging_data()
            buckets = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
            written = {"began": began, "buckets": [int(each) for each in buckets.split(",")]}
            write(out, written)
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1] == "ddp":
        sizes = [int(each) for each in sys.argv[2].split(",")]
        ddp(sizes, int(sys.argv[3]), Path(sys.argv[4]))
        return
    role, address, text = sys.argv[1:4]
    if role == "ranks":
        rank = int(os.environ["SLACKWATER_RANK"])
        role = "server" if rank > 1 else "worker"
        servers, number, workers, iterations = 2, rank % 2, 2, 100_000
    else:
        servers, number, workers, iterations = map(int, sys.argv[4:8])
    sizes = [int(each) for each in text.split(",")]
    owned = [sizes[each::servers] for each in range(servers)]
    addresses = [Path(f"{address}.{each}") for each in range(servers)]
    if role == "server":
        serve(owned[number], addresses[number], workers, iterations)
    else:
        work(owned, addresses, iterations, Path(f"{address}.worker{number}"))


if __name__ == "__main__":
    main()
