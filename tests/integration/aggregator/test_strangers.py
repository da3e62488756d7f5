"""A program of one job tries to get at another's regions, by every token and key that it could
have: it reads and writes no byte, and the other's training equals its replay bit for bit."""

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slackwater.common.base.errors import AccessRefused, Rejected
from slackwater.common.domains.slots.frames import Hello, encode_hello
from slackwater.common.domains.slots.tokens import process_token
from slackwater.common.transport.base import Channel, Fabric
from slackwater.common.transport.channel import KEY_BYTES
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric

pytestmark = [pytest.mark.live, pytest.mark.timeout(1700)]
FABRICS: dict[str, Callable[[], Fabric]] = {"shm": ShmFabric, "tcp": TcpFabric}


def thief_token() -> str:
    return process_token("of-thief", 0, 0)


def forged(rng: random.Random) -> Iterator[Hello]:
    """Say what a program of job `thief` could say to be taken for one of job `victim`."""
    secret = "of-victim"
    token = process_token(secret, 0, 0)
    while True:
        rank, attempt = rng.randrange(2, 60), rng.randrange(1, 200)
        beyond = process_token(secret, rank, 0)
        yield from (
            Hello(role="agent", job="victim", layout_epoch=1, token=secret),
            # Another rank of the same job, and another process of this one.
            Hello(role="agent", job="victim", layout_epoch=1, rank=1, token=token),
            Hello(role="agent", job="victim", layout_epoch=1, attempt=attempt, token=token),
            Hello(role="agent", job="victim", layout_epoch=1, token=secrets.token_hex(16)),
            Hello(role="agent", job="victim", layout_epoch=1, token=thief_token()),
            Hello(role="agent", job="victim", layout_epoch=1),
            Hello(role="agent", job="victim", layout_epoch=1, token=token[: rng.randrange(64)]),
            Hello(role="agent", job="victim", layout_epoch=1, token=token.upper()),
            Hello(role="agent", job="victim", layout_epoch=1, token=token + "\0"),
            # A token that was right once: of another layout, or another number of workers.
            Hello(role="agent", job="victim", layout_epoch=0, token=token),
            Hello(role="agent", job="victim", layout_epoch=2, token=token),
            Hello(role="agent", job="victim", rank=rank, layout_epoch=1, token=beyond),
            Hello(role="aggregator", sender="a9", token="of-thief"),
            Hello(role="aggregator", job="victim", sender="a1"),
        )


async def refused(fabric: Fabric, address: str, hello: Hello) -> bool:
    channel: Channel | None = None
    try:
        channel = await fabric.connect(address, encode_hello(hello), deadline_s=10.0)
    except AccessRefused:
        return True
    await channel.close()
    return False


async def steal(kind: str, tries: int, lab: Any, training: Any, check_result: Any) -> None:
    """Half of the tries are connections, half are keys on a channel of the thief's own job."""
    await lab.aggregators("a1", tcp_address="127.0.0.1:0", cluster_token=secrets.token_hex(16))
    sizes = {"w": 50_001, "b": 3_001}
    victim, thief = (training(job=job, sizes=sizes) for job in ("victim", "thief"))
    victim.start()
    thief.start()
    await victim.until(3)
    await thief.until(3)
    addresses = dict(lab.director.beats["a1"].addresses)
    fabric, rng = FABRICS[kind](), random.Random(7)
    hellos = forged(rng)
    for _ in range(tries // 2):
        assert await refused(fabric, addresses[kind], next(hellos))
    own = Hello(role="agent", job="thief", layout_epoch=1, token=thief_token())
    channel = await fabric.connect(addresses[kind], encode_hello(own), deadline_s=10.0)
    keys = [rng.randbytes(KEY_BYTES) for _ in range(tries - tries // 2)]
    for first in range(0, len(keys), 64):
        opened = await asyncio.gather(
            *(channel.open(key) for key in keys[first : first + 64]), return_exceptions=True
        )
        assert all(isinstance(each, Rejected) for each in opened), opened
    await channel.close()
    last = await victim.finish()
    await thief.finish()
    await check_result(victim, last)


@pytest.mark.parametrize("kind", sorted(FABRICS))
async def test_a_stranger_reads_and_writes_no_byte(
    kind: str, lab: Any, training: Any, check_result: Any
) -> None:
    """Takes some seconds: two jobs train on a real aggregator meanwhile."""
    await steal(kind, 400, lab, training, check_result)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(FABRICS))
async def test_a_hundred_thousand_tries_read_and_write_no_byte(
    kind: str, lab: Any, training: Any, check_result: Any
) -> None:
    """100,000 tries a transport, each a round trip at least: some minutes."""
    await steal(kind, 100_000, lab, training, check_result)
