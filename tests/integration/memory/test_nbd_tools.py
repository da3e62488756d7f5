"""The NBD clients that people have, unmodified, against a device in remote memory."""

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1024 * 1024
Make = Callable[..., Any]


async def run(*command: str | Path) -> str:
    """Its output; it must end well."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: fio, libnbd-bin, qemu-utils)")
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()


def uri(assembly: Any) -> str:
    return f"nbd+unix:///?socket={assembly.options.socket}"


async def test_nbdinfo_sees_what_is_offered(cluster: Make) -> None:
    async with cluster("shm") as c:
        assembly = await c.export(8 * MIB)
        found = json.loads(await run("nbdinfo", "--json", uri(assembly)))
        [export] = found["exports"]
        assert found["structured"]
        assert export["export-size"] == 8 * MIB
        assert all(export[f"can_{what}"] for what in ("flush", "fua", "trim", "zero", "multi_conn"))
        assert export["block_size_preferred"] == 4096


async def test_nbdinfo_maps_what_was_written_and_let_go(cluster: Make) -> None:
    """Holes are told as holes, in the file or in remote memory, before a flush as after it."""
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(8 * MIB)
        for _ in range(2):  # The second time, a span is in remote memory.
            await run(
                "qemu-io", "-f", "raw", "-c", "write 1M 64k", "-c", "write 1060k 5000",
                "-c", "write 4M 1M", "-c", "discard 4100k 8k", uri(assembly),
            )  # fmt: skip
            found = json.loads(await run("nbdinfo", "--json", "--map", uri(assembly)))
            told = [(one["offset"], one["length"], one["type"]) for one in found]
            kib = 1024
            assert told == [
                (0, 1024 * kib, 3), (1024 * kib, 64 * kib, 0), (1088 * kib, 3008 * kib, 3),
                (4096 * kib, 4 * kib, 0), (4100 * kib, 8 * kib, 3), (4108 * kib, 1012 * kib, 0),
                (5120 * kib, 3072 * kib, 3),
            ]  # fmt: skip
            await c.until(lambda: assembly.device.mapped_spans > 0)


async def test_nbdcopy_copies_in_and_out_over_several_connections(
    cluster: Make, tmp_path: Path
) -> None:
    async with cluster("shm") as c:
        await c.lend(2)
        assembly = await c.export(8 * MIB)
        source, back = tmp_path / "source", tmp_path / "back"
        source.write_bytes(random.Random(1).randbytes(8 * MIB))
        for _ in range(2):  # The second time, spans are in remote memory.
            await run("nbdcopy", "--connections=4", "--flush", source, uri(assembly))
            await c.until(lambda: assembly.device.mapped_spans > 0)
        await run("nbdcopy", "--connections=4", uri(assembly), back)
        assert back.read_bytes() == source.read_bytes()
        assert assembly.options.backup.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_fio_verifies_every_block(cluster: Make, kind: str) -> None:
    """Random writes of mixed sizes, checksums in every block, read back and verified, three times
    while spans move to remote memory."""
    async with cluster(kind) as c:
        await c.lend(2)
        assembly = await c.export(8 * MIB)
        out = await run(
            "fio", "--name=v", "--ioengine=nbd", f"--uri={uri(assembly)}", "--rw=randwrite",
            "--bsrange=4k-128k", "--size=8M", "--iodepth=16", "--verify=crc32c", "--do_verify=1",
            "--verify_fatal=1", "--verify_state_save=0", "--loops=3", "--fsync=64",
        )  # fmt: skip
        assert "err= 0" in out


async def test_qemu_io_writes_odd_ranges_zeroes_and_discards(cluster: Make) -> None:
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(8 * MIB)
        commands = (
            "write -P 0x5a 1000 5000", "read -P 0x5a 1000 5000",
            "write -z 8192 65536", "read -P 0 8192 65536",
            "write -P 7 1M 1M", "discard 1M 1M", "read -P 0 1M 1M",
            "write -f -P 9 4M 4096", "read -P 9 4M 4096", "flush",
        )  # fmt: skip
        words = [word for command in commands for word in ("-c", command)]
        out = await run("qemu-io", "-f", "raw", *words, uri(assembly))
        assert "failed" not in out
        assert "error" not in out.lower()
