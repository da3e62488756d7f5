"""A record that cannot be read: set aside with an alarm, the rest served, its bytes kept."""

import pytest
from tests.unit.common.shell.ledger import Running, simulate

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import DecodeRejected, VersionRejected
from slackwater.common.shell.recovery import DAMAGED
from slackwater.common.shell.world import SimWorld
from slackwater.common.store.base import Bucket
from slackwater.schemas.service import GetHealth, GetStats


async def _bucket(sim: SimWorld, name: str = "accounts") -> Bucket:
    return await sim.client("vandal").store.bucket(name)


async def _filled(sim: SimWorld, accounts: int) -> Bucket:
    service = await Running(sim).ready()
    for number in range(accounts):
        await service.add("c", 1, f"a{number}")
    await service.end()
    return await _bucket(sim)


async def _damage(bucket: Bucket, key: str) -> bytes:
    entry = await bucket.get(key)
    assert entry is not None
    assert entry.value is not None
    damaged = entry.value[:-1] + bytes([entry.value[-1] ^ 1])
    await bucket.put(key, damaged, expected_last=await bucket.last_sequence())
    return damaged


def test_one_damaged_record_is_set_aside_and_the_rest_is_served() -> None:
    async def main() -> None:
        sim = SimWorld(1)
        bucket = await _filled(sim, 3)
        damaged = await _damage(bucket, "a1")
        for _ in range(2):  # Every start says so, until a person has seen to it.
            service = await Running(sim).ready()
            assert set(service.core.accounts) == {"a0", "a2"}
            assert (await service.add("d", 1, "a2")).total >= 2
            health = await service.ask("health", GetHealth())
            assert health.state == "degraded"
            assert "bucket accounts: 1 records are damaged, set aside: a1" in health.reason
            stats = await service.ask("stats", GetStats())
            assert stats.gauges["records_damaged"] == 1.0
            await service.end()
        copies, *_ = await (await _bucket(sim, DAMAGED)).load()
        assert [entry.value for entry in copies.values()] == [damaged]
        assert all(key.startswith("accounts.a1.") for key in copies)

    simulate(main())


def test_the_copy_outlives_a_new_record_under_the_same_key() -> None:
    async def main() -> None:
        sim = SimWorld(2)
        bucket = await _filled(sim, 2)
        damaged = await _damage(bucket, "a1")
        service = await Running(sim).ready()
        assert (await service.add("new", 7, "a1")).total == 7
        await service.end()
        copies, *_ = await (await _bucket(sim, DAMAGED)).load()
        assert [entry.value for entry in copies.values()] == [damaged]
        again = await Running(sim).ready()
        assert (await again.ask("health", GetHealth())).state == "ok"
        await again.end()

    simulate(main())


def test_the_core_is_told_which_keys_are_not_free() -> None:
    async def main() -> None:
        sim = SimWorld(3)
        await _damage(await _filled(sim, 2), "a0")
        service = await Running(sim).ready()
        assert service.core.events[0].damaged == {"accounts": frozenset({"a0"})}
        await service.end()

    simulate(main())


def test_a_bucket_that_is_mostly_damaged_stops_the_start() -> None:
    async def main() -> None:
        sim = SimWorld(4)
        count = limits.DAMAGED_FEW + 1
        bucket = await _filled(sim, count)
        for number in range(count):
            await _damage(bucket, f"a{number}")
        with pytest.raises(DecodeRejected, match=r"17 of 17 records.*nats kv del"):
            await Running(sim).task

    simulate(main())


def test_records_that_are_one_whole_stop_the_start_with_the_first_damaged_one() -> None:
    async def main() -> None:
        sim = SimWorld(5)
        await _damage(await _filled(sim, 3), "a1")
        with pytest.raises(DecodeRejected, match=r"accounts/a1.*nats kv del"):
            await Running(sim, needs_all_records=True).task

    simulate(main())


def test_a_newer_release_s_record_is_not_damaged_and_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        sim = SimWorld(6)
        await _filled(sim, 3)
        monkeypatch.setattr(codec, "SCHEMA_VERSION", 0)
        with pytest.raises(VersionRejected, match="upgrade this process first"):
            await Running(sim).task

    simulate(main())
