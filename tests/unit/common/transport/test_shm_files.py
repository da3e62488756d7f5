"""shm's own: who may connect, socket files, and descriptors that lie."""

import array
import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    ConfigRejected,
    DeadlineExceeded,
    Unavailable,
)
from slackwater.common.transport import wire
from slackwater.common.transport.base import Channel, Offering
from slackwater.common.transport.host import elsewhere, host_identity, identified, split_identity
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric, ShmListener


async def listen(path: Path, fabric: ShmFabric | None = None) -> tuple[ShmListener, Any]:
    arrived: asyncio.Queue[Channel] = asyncio.Queue()

    async def keep(channel: Channel) -> None:
        arrived.put_nowait(channel)

    async def take(_region: Region, _note: bytes) -> None:
        raise AssertionError("nobody hands over here")

    made = await (fabric or ShmFabric()).listen(str(path), lambda _hello: None, keep, take)
    return made, arrived


async def test_the_socket_file_is_private_and_goes_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    listener, _ = await listen(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.sock"]
    assert listener.address == identified(str(path), host_identity())
    await listener.close()
    assert os.listdir(tmp_path) == []


async def test_the_file_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    dead.close()
    listener, arrived = await listen(path)
    near = await ShmFabric().connect(str(path), b"", deadline_s=5)
    await arrived.get()
    await near.close()
    await listener.close()


async def test_the_file_of_a_living_process_or_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    listener, _ = await listen(path)
    with pytest.raises(ConfigRejected, match="living process"):
        await listen(path)
    await listener.close()
    path.write_text("precious")
    with pytest.raises(ConfigRejected, match="not a socket"):
        await listen(path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigRejected, match="shorter"):
        await listen(tmp_path / ("x" * 120))
    with pytest.raises(ConfigRejected, match="cannot listen"):
        await listen(tmp_path / "absent" / "a.sock")


async def test_a_successors_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    first, _ = await listen(path)
    path.unlink()
    second, _ = await listen(path)
    await first.close()
    assert path.exists()
    await second.close()


async def test_another_user_is_refused_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = ShmFabric()
    monkeypatch.setattr(strict, "_uids", frozenset({12345}))
    listener, arrived = await listen(tmp_path / "a", strict)
    with pytest.raises(AccessRefused, match="12345"):
        await ShmFabric().connect(str(tmp_path / "a"), b"", deadline_s=5)
    assert arrived.empty()
    await listener.close()
    folder = tmp_path / "anybody"
    folder.mkdir()
    folder.chmod(0o777)  # Any account could listen there.
    listener, arrived = await listen(folder / "b")
    with pytest.raises(AccessRefused, match="12345"):
        await strict.connect(str(folder / "b"), b"", deadline_s=5)
    folder.chmod(0o755)  # Now its owner alone.
    channel = await strict.connect(str(folder / "b"), b"", deadline_s=5)
    await channel.close()
    await listener.close()
    assert 777 in ShmFabric(allowed_uids=frozenset({777}))._uids


async def test_an_address_of_another_host_is_not_tried(tmp_path: Path) -> None:
    listener, _ = await listen(tmp_path / "a")
    with pytest.raises(Unavailable, match="another host"):
        await ShmFabric(host="elsewhere").connect(listener.address, b"", deadline_s=5)
    await listener.close()


def test_an_address_is_a_path_with_or_without_its_host() -> None:
    assert split_identity("h-1!/run/a.sock") == ("h-1", "/run/a.sock")
    assert split_identity("h-1@8.f!/run/a.sock") == ("h-1", "/run/a.sock")
    assert split_identity("/run/a!b.sock") == ("", "/run/a!b.sock")


def test_the_same_path_in_another_container_is_another_socket(tmp_path: Path) -> None:
    """Containers of one host have its boot id: two aggregators' sockets were taken for one."""
    path = str(tmp_path / "a.sock")
    assert elsewhere(identified(path, "h-1"), "h-1") == ""
    assert elsewhere(f"h-1!{path}", "h-1") == ""  # Version 0.3.0 says no more.
    assert elsewhere(identified(path, "h-1"), "h-2") == f"{path} is on another host"
    moved = identified(path, "h-1").replace("!", "0!")
    assert elsewhere(moved, "h-1") == f"{path} is in another container of this host"
    gone = f"h-1@8.f!{tmp_path}/none/a.sock"
    assert elsewhere(gone, "h-1") == f"{tmp_path}/none/a.sock: No such file or directory"


class Liar:
    """A process of our user that speaks the protocol as it likes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> "Liar":
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.sock, str(self._path))
        self.say(wire.pack(wire.HELLO, handle=wire.VERSION, body=b"liar"))
        assert len(await loop.sock_recv(self.sock, 4096)) == wire.HEADER_BYTES
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()

    def say(self, record: bytes, fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([record], rights)


def handover(fds: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
    return wire.pack(wire.HANDOVER, offset=1, handle=1, body=b"r"), fds


async def test_descriptors_that_lie_are_refused_and_none_is_left_open(tmp_path: Path) -> None:
    """The leak check of this folder sees every descriptor that stays behind."""
    listener, arrived = await listen(tmp_path / "a")
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    async with Liar(tmp_path / "a") as liar:
        channel = await arrived.get()
        liar.say(*handover((unsealed,)))
        answer = await asyncio.get_running_loop().sock_recv(liar.sock, 4096)
        assert wire.Header._make(wire.HEADER.unpack_from(answer)).kind == wire.REFUSED
        assert b"sealed" in answer
        assert not channel.closed
        liar.say(*handover(()))
        with pytest.raises(Unavailable):
            await asyncio.wait_for(channel.receive(), 5)
    os.close(unsealed)
    await listener.close()


@pytest.mark.parametrize("count", [1, 16, 40])
async def test_descriptors_that_nobody_asked_for(tmp_path: Path, count: int) -> None:
    listener, arrived = await listen(tmp_path / "a")
    region = Region.create(4096, "r")
    async with Liar(tmp_path / "a") as liar:
        channel = await arrived.get()
        liar.say(wire.pack(wire.FRAME, body=b"with a gift"), (region.fileno(),) * count)
        if count <= 16:
            assert await asyncio.wait_for(channel.receive(), 5) == b"with a gift"
        else:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(channel.receive(), 5)
    await listener.close()
    region.close()


async def test_memory_of_another_size_than_said_ends_the_channel(tmp_path: Path) -> None:
    """The owner lies about what it granted."""
    listener, arrived = await listen(tmp_path / "a")
    region = Region.create(4096, "r")
    async with Liar(tmp_path / "a") as liar:
        channel = await arrived.get()
        opening = asyncio.create_task(channel.open(b"key"))
        request = await asyncio.get_running_loop().sock_recv(liar.sock, 4096)
        header = wire.Header._make(wire.HEADER.unpack_from(request))
        liar.say(wire.pack(wire.OPENED, offset=header.offset, number=8192), (region.fileno(),))
        with pytest.raises(Unavailable, match="8192"):
            await asyncio.wait_for(opening, 5)
    await listener.close()
    region.close()


async def test_an_answer_that_comes_too_late_leaves_no_mapping(tmp_path: Path) -> None:
    listener, arrived = await listen(tmp_path / "a")
    region = Region.create(4096, "r")
    async with Liar(tmp_path / "a") as liar:
        channel = await arrived.get()
        opening = asyncio.create_task(channel.open(b"key"))
        request = await asyncio.get_running_loop().sock_recv(liar.sock, 4096)
        header = wire.Header._make(wire.HEADER.unpack_from(request))
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        liar.say(wire.pack(wire.OPENED, offset=header.offset, number=4096), (region.fileno(),))
        liar.say(wire.pack(wire.FRAME, body=b"behind it"))
        assert await asyncio.wait_for(channel.receive(), 5) == b"behind it"
    await listener.close()
    region.close()


async def test_memory_that_cannot_be_mapped_fails_the_open_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, arrived = await listen(tmp_path / "a")
    near = await ShmFabric().connect(listener.address, b"", deadline_s=5)
    far = await arrived.get()
    region = Region.create(4096, "r")
    key = far.grant(region)

    def full(*_: object) -> None:
        raise OSError("too many mappings")

    with monkeypatch.context() as patch:
        patch.setattr("slackwater.common.transport.shm.Mapping", full)
        with pytest.raises(Unavailable, match="too many mappings"):
            await near.open(key)
    assert (await near.open(key)).nbytes == 4096
    await near.close()
    await listener.close()
    region.close()


async def test_what_was_offered_is_opened_without_asking(tmp_path: Path) -> None:
    """The memory comes before the frame that names its key; nothing goes back."""
    listener, arrived = await listen(tmp_path / "a")
    region = Region.create(4096, "r")
    key = bytes(range(32))
    async with Liar(tmp_path / "a") as liar:
        channel = await arrived.get()
        liar.say(wire.pack(wire.OPENED, number=4096, body=key), (region.fileno(),))
        liar.say(wire.pack(wire.FRAME, body=b"it is yours"))
        assert await asyncio.wait_for(channel.receive(), 5) == b"it is yours"
        remote = await channel.open(key)
        await channel.write(memoryview(b"here"), remote, 8)
        assert bytes(region.buffer[8:12]) == b"here"
        with pytest.raises(BlockingIOError):
            liar.sock.recv(1, socket.MSG_DONTWAIT)
        liar.say(wire.pack(wire.OPENED, number=4096, body=b"short"), (region.fileno(),))
        with pytest.raises(Unavailable, match="key of 5 bytes"):
            await asyncio.wait_for(channel.receive(), 5)
    await listener.close()
    region.close()


async def test_an_offer_can_be_taken_back_and_too_many_are_asked_for(tmp_path: Path) -> None:
    listener, arrived = await listen(tmp_path / "a")
    near = await ShmFabric().connect(listener.address, b"", deadline_s=5)
    far = await arrived.get()
    region = Region.create(4096, "r")
    assert isinstance(far, Offering)
    taken = far.offer(region)
    far.revoke(taken)
    keys = [far.offer(region) for _ in range(limits.OFFERS_MAX + 3)]
    far.send(b"behind them")
    assert await asyncio.wait_for(near.receive(), 5) == b"behind them"
    with pytest.raises(AccessRefused):
        await near.open(taken)
    opened = [await near.open(key) for key in keys]
    far.revoke(keys[0])
    far.send(b"behind that")
    await asyncio.wait_for(near.receive(), 5)
    with pytest.raises(AccessRefused, match="revoked"):
        await near.write(memoryview(b"x"), opened[0], 0)
    await near.close()
    with pytest.raises(Unavailable):
        await near.open(keys[1])
    await listener.close()
    region.close()


async def test_a_full_backlog_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """A listener that does not accept, with more who knock than its backlog holds."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "a"))
        deaf.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(tmp_path / "a"))
            with pytest.raises(DeadlineExceeded):
                await ShmFabric().connect(str(tmp_path / "a"), b"", deadline_s=0.1)
