"""A store that loses records under services, that begin or live, and what their peers remember."""

import asyncio
import copy
from typing import Any

import pytest
import structlog
from tests.unit.common.shell.ledger import Running, simulate

from slackwater.common.base import codec, limits
from slackwater.common.base.codec import encode
from slackwater.common.base.effects import Publish
from slackwater.common.base.errors import RecordsMissing, RolledBack
from slackwater.common.shell.known import _write_back
from slackwater.common.shell.peers import Peers
from slackwater.common.shell.world import SimWorld
from slackwater.common.store.accepted import accept
from slackwater.common.store.base import EPOCH_KEY
from slackwater.common.store.witness import Content, Mark
from slackwater.common.store.witness_file import MemoryWitnesses
from slackwater.schemas.service import EpochRecord

BUCKET = "accounts"


def kept(sim: SimWorld) -> Any:
    """Return a copy of the bucket as the server has it."""
    return copy.copy(sim.storage._streams[BUCKET]), dict(sim.storage._streams[BUCKET].entries)


def put_back(sim: SimWorld, older: Any) -> None:
    stream, entries = older
    now = sim.storage._streams[BUCKET]
    now.last, now.mark = stream.last, stream.mark
    now.entries = dict(entries)


def test_a_bucket_that_is_taken_over_is_marked_with_what_it_holds() -> None:
    """Without a mark a peer could not tell that the bucket is older than the take-over."""

    async def main() -> None:
        sim = SimWorld(1)
        service = await Running(sim).ready()
        await service.add("c1", 5)
        await Running(sim).ready()
        loaded = await (await sim.client("looks").store.bucket(BUCKET)).load()
        assert loaded.records
        assert loaded.mark == Content(loaded.records).mark(2, loaded.last)

    simulate(main())


@pytest.mark.parametrize("looks", [False, True], ids=["at a write", "at the next look"])
def test_a_service_that_lives_writes_back_what_is_lost(looks: bool) -> None:
    async def main() -> None:
        sim = SimWorld(1)
        service = await Running(sim).ready()
        await service.add("c1", 5)
        older = kept(sim)
        for number in range(2, 9):
            await service.add(f"c{number}", 5, account=f"a{number % 3}")
        put_back(sim, older)
        if looks:
            await asyncio.sleep(limits.CHECK_S + 60.0)
        else:
            asyncio.ensure_future(service.add("c9", 5))  # noqa: RUF006 (it is never answered)
        with pytest.raises(RolledBack, match="were written back from memory"):
            await service.task
        again = await Running(sim).ready()
        assert again.core.epoch > service.core.epoch + 1
        assert again.core.accounts == service.core.accounts
        await again.end()

    simulate(main())


def test_a_service_that_starts_refuses_until_it_is_accepted() -> None:
    async def main() -> None:
        sim = SimWorld(2)
        service = await Running(sim).ready()
        await service.add("c1", 5)
        older = kept(sim)
        await service.add("c2", 5, account="b")
        await service.end()
        put_back(sim, older)
        for _ in range(2):
            with pytest.raises(RecordsMissing, match=r"missing: b\)\. Restore a backup"):
                await Running(sim).ready()
        operator = sim.client("operator")
        await accept(operator.store, BUCKET, "a test", 1.0)
        again = await Running(sim).ready()
        assert set(again.core.accounts) == {"a"}
        await again.add("c3", 5, account="c")
        await again.end()
        await (await Running(sim).ready()).end()

    simulate(main())


def test_a_record_that_is_left_out_is_named() -> None:
    """The end of the bucket is as it was."""

    async def main() -> None:
        sim = SimWorld(3)
        service = await Running(sim).ready()
        for number in range(5):
            await service.add(f"c{number}", account=f"a{number}")
        await service.end()
        del sim.storage._streams[BUCKET].entries["a2"]
        with pytest.raises(RecordsMissing, match=r"missing: a2"):
            await Running(sim).ready()
        sim.witnesses.clear()  # On another host, without the file.
        with pytest.raises(RecordsMissing, match=r"held 5 records, and 4 records are there\."):
            await Running(sim).ready()

    simulate(main())


def test_a_host_without_the_file_asks_its_peers() -> None:
    """After a failover nobody else knows that the store is an older copy."""

    async def main() -> None:
        sim = SimWorld(4)

        async def said(effect: Publish) -> None:
            await bus.publish(effect.subject, encode(effect.message))

        bus = sim.client("profiler").bus
        witness = Peers("profiler", "p1", bus, sim.clock, said)
        await witness.listen()
        leads = Peers("master", "main", bus, sim.clock, said)
        first, newer, older = (Mark(1, n, n, f"{n:032x}") for n in (1, 9, 5))
        for mark in (first, newer, older):
            await leads.tell("jobs", mark)
        await leads.tell("nodes", first)
        asking = Peers("master", "main", sim.client("other host").bus, sim.clock, said)
        found = await asking.remembered(("jobs", "nodes", "usage"))
        assert found == {"jobs": [newer], "nodes": [first], "usage": []}

    simulate(main())


def test_memory_of_one_disk_is_of_its_buckets() -> None:
    witnesses = MemoryWitnesses()
    assert witnesses.of("a") is witnesses.of("a")
    assert witnesses.of("a") is not witnesses.of("b")


def test_a_write_without_a_mark_is_told_of_at_the_next_start_and_refuses_nothing() -> None:
    """A person deleted a record by hand."""

    async def main() -> None:
        sim = SimWorld(1)
        service = await Running(sim).ready()
        await service.add("c1", 5)
        await service.end()
        bucket = await sim.client("a person").store.bucket(BUCKET)
        await bucket.delete("a", expected_last=await bucket.last_sequence())
        with structlog.testing.capture_logs() as logs:
            again = await Running(sim).ready()
        told = [each for each in logs if each["event"] == "bucket.unchecked"]
        assert [each["bucket"] for each in told] == [BUCKET]
        await again.end()
        with structlog.testing.capture_logs() as logs:
            third = await Running(sim).ready()
        assert not [each for each in logs if each["event"] == "bucket.unchecked"]
        await third.end()

    simulate(main())


def test_what_is_written_back_is_of_the_next_epoch_and_marked_at_its_place() -> None:
    async def main() -> None:
        sim = SimWorld(1)
        store = sim.client("a").store
        bucket = await store.bucket("b")
        told = EpochRecord(epoch=4, writer="a", since_s=0.0)
        first = await bucket.put(EPOCH_KEY, codec.encode_record(told, 4), expected_last=0)
        keys, mark = await _write_back(store, "a", (4, first), sim.clock, "b", {})
        assert (list(keys), mark.epoch, mark.sequence) == ([], 5, first + 1)
        assert await bucket.last_sequence() == first + 1
        ours = (5, first + 1)
        keys, mark = await _write_back(store, "a", ours, sim.clock, "b", {"k": b"v"})
        assert (list(keys), mark.epoch, mark.sequence) == (["k"], 6, first + 3)
        assert (await bucket.load()).mark == mark

    simulate(main())
