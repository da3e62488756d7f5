"""RDMA as far as it can be tested without a device: finding one, choosing addresses, sharing
bounds."""

import asyncio
import itertools
from pathlib import Path

import pytest

from slackwater.common.base.errors import AccessRefused, DecodeRejected, Unavailable
from slackwater.common.transport import negotiate
from slackwater.common.transport.base import Fabric
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.common.transport.negotiate import connect_best
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.verbs import library
from slackwater.common.transport.verbs.library import Gid, choose_gid, mapped_ip, ports, why_not
from slackwater.common.transport.verbs.queue_pair import (
    END_POINT_BYTES,
    EndPoint,
    unpack_end_point,
)
from slackwater.common.transport.verbs.staging import PAGE_BYTES, Quota, Staging

V4 = "0000:0000:0000:0000:0000:ffff:0a63:0001"
OTHER_V4 = "0000:0000:0000:0000:0000:ffff:c0a8:0001"
LOCAL = "fe80:0000:0000:0000:bc5e:54ff:fe7e:1e24"


def host(folder: Path, state: str = "4: ACTIVE", allowed: bool = True) -> tuple[Path, Path]:
    """A host with one device: (its sysfs, its device files)."""
    port = folder / "infiniband" / "mlx5_0" / "ports" / "1"
    (port / "gid_attrs" / "ndevs").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "gid_attrs" / "ndevs" / "0").write_text("ens1\n")
    verbs = folder / "infiniband_verbs" / "uverbs0"
    verbs.mkdir(parents=True)
    (verbs / "ibdev").write_text("mlx5_0\n")
    files = folder / "dev"
    files.mkdir()
    if allowed:
        (files / "uverbs0").write_text("")
    return folder / "infiniband", files


def test_a_port_is_found_with_its_interface(tmp_path: Path) -> None:
    [port] = ports(*host(tmp_path))
    assert (str(port), port.active, port.allowed, port.netdev) == ("mlx5_0/1", True, True, "ens1")


@pytest.mark.parametrize(
    ("state", "allowed", "said"),
    [
        ("1: DOWN", True, "no port is active of mlx5_0/1"),
        ("4: ACTIVE", False, "may not open mlx5_0/1"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, allowed: bool, said: str
) -> None:
    monkeypatch.setattr(library, "library_found", lambda: False)
    why = why_not(*host(tmp_path, state, allowed))
    assert said in why
    assert "python3-pyverbs" in why
    assert "no RDMA device" in why_not(tmp_path / "nothing")


def test_a_host_that_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_found", lambda: True)
    assert why_not(*host(tmp_path)) == ""


@pytest.mark.parametrize(
    ("local_ip", "chosen"), [("", 3), ("192.168.0.1", 4), ("10.99.0.1", 3), ("127.0.0.1", 3)]
)
def test_the_address_of_the_interface_that_leads_to_the_peer(local_ip: str, chosen: int) -> None:
    """RoCE v2 with IPv4 before the others; v1 entries carry the same addresses and are last."""
    table = [Gid(0, LOCAL, 1), Gid(1, LOCAL, 2), Gid(2, V4, 1), Gid(3, V4, 2), Gid(4, OTHER_V4, 2)]
    found = choose_gid(table, local_ip)
    assert found is not None
    assert found.index == chosen
    assert choose_gid([]) is None
    only = choose_gid([Gid(7, LOCAL, 0)], local_ip)
    assert only is not None
    assert only.index == 7


def test_a_mapped_address_is_read() -> None:
    assert mapped_ip(V4) == "10.99.0.1"
    assert mapped_ip(LOCAL) == ""
    assert mapped_ip("") == ""


def test_a_queue_pair_is_described_as_it_is_and_nothing_else_is_taken() -> None:
    end_point = EndPoint(17, 0xFFFFFF, 3, 5, 2, 16, V4)
    packed = end_point.pack()
    assert unpack_end_point(packed) == end_point
    for length in range(END_POINT_BYTES):
        with pytest.raises(DecodeRejected):
            unpack_end_point(packed[:length])
    with pytest.raises(DecodeRejected, match="MTU"):
        unpack_end_point(bytes(END_POINT_BYTES))


async def test_bounds_are_kept_and_nobody_overtakes() -> None:
    quota = Quota(2, 100)
    await quota.take(60)
    order: list[int] = []

    async def take(nbytes: int) -> None:
        await quota.take(nbytes)
        order.append(nbytes)

    tasks = [asyncio.create_task(take(nbytes)) for nbytes in (50, 10)]
    await asyncio.sleep(0)
    assert order == []  # 10 would fit, and 50 was first.
    quota.give(60)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [50, 10]
    await asyncio.gather(*tasks)


async def test_a_waiter_that_gives_up_holds_nobody_up() -> None:
    quota = Quota(1, 10)
    await quota.take(10)
    first, second = (asyncio.create_task(quota.take(nbytes)) for nbytes in (10, 5))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    quota.give(10)
    await asyncio.wait_for(second, 5)
    third = asyncio.create_task(quota.take(5))
    await asyncio.sleep(0)
    quota.give(5)
    third.cancel()  # It has its turn and does not know yet: it passes it on.
    await asyncio.gather(third, return_exceptions=True)
    await asyncio.wait_for(quota.take(5), 5)


async def test_who_waits_is_told_of_the_end() -> None:
    quota = Quota(0, 0)
    waiting = asyncio.create_task(quota.take(0))
    await asyncio.sleep(0)
    quota.lose("the peer is gone")
    for take in (waiting, quota.take(0)):
        with pytest.raises(Unavailable, match="gone"):
            await take


async def test_pages_and_blocks_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slackwater.common.base.limits.VERBS_STAGING_PAGES", 2)
    monkeypatch.setattr("slackwater.common.base.limits.VERBS_BLOCK_BYTES", 8 * PAGE_BYTES)
    memory = memoryview(bytearray(18 * PAGE_BYTES))
    staging = Staging(memory)
    taken = [await staging.take(n) for n in (1, PAGE_BYTES, PAGE_BYTES + 1, 8 * PAGE_BYTES)]
    spans = sorted((block.offset, block.offset + len(block.view)) for block in taken)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(memory)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(spans))
    waiting = asyncio.create_task(staging.take(PAGE_BYTES))
    await asyncio.sleep(0)
    taken[2].give()
    await asyncio.sleep(0)
    assert not waiting.done()
    taken[0].give()
    assert (await asyncio.wait_for(waiting, 5)).offset == taken[0].offset


async def test_the_next_best_is_tried_where_the_best_does_not_answer() -> None:
    """Two hosts have RDMA devices, and no RDMA network between them."""
    served = TcpFabric()

    async def keep(_channel: object) -> None:
        """It stays open."""

    async def none(_region: object, _note: bytes) -> None:
        raise AccessRefused("none here")

    listener = await served.listen("127.0.0.1:0", lambda _hello: None, keep, none)
    mine: dict[str, Fabric] = {"memory": MemoryFabric(MemoryNetwork()), "tcp": served}
    offers = [("tcp", listener.address), ("memory", "nobody")]
    assert [fabric.kind for fabric, _ in negotiate.candidates(mine, offers)] == ["memory", "tcp"]
    fabric, channel = await connect_best(mine, offers, b"hi", deadline_s=5)
    assert fabric.kind == "tcp"
    await channel.close()
    with pytest.raises(Unavailable):
        await connect_best(mine, [("memory", "nobody")], b"hi", deadline_s=5)
    await listener.close()
