"""Users of a bus with accounts may do what schemas/permissions.py declares, exactly: the server
itself is asked for each user and each subject."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base.errors import AccessRefused, ConfigRejected, NobodyThere
from slackwater.common.bus.identity import tenant_of
from slackwater.common.bus.memory import permitted
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.bus.users import BusUser
from slackwater.schemas import permissions, subjects
from slackwater.schemas.facts import FACTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

IDS = {service: f"{service[0]}1" for service in permissions.SERVICES} | {"master": "m1"}
SERVICES = [f"{service}-{id}" for service, id in IDS.items()]
SHARED_BUCKETS = ("instances", "breaches", "damaged", "leases")
USERS = [*SERVICES, "operator", "tenant-red", "tenant-blue"]


def asked() -> Iterator[str]:
    """Every request that any service answers, and those of another instance."""
    for service, verbs in permissions.SERVED.items():
        ids = [subjects.MASTER] if service == "master" else [IDS[service], "other"]
        for id in ids:
            for verb in (*verbs, *permissions.OWN_VERBS):
                yield subjects.command(service, id, verb)
                yield subjects.owned("red", service, id, verb)


def said() -> Iterator[str]:
    """Every fact and every kind of telemetry."""
    for noun, facts in FACTS.items():
        for fact in facts:
            yield subjects.event(noun, "x", fact)
    for service, id in IDS.items():
        own = subjects.MASTER if service == "master" else id
        for what in ("heartbeat", *permissions.MEASURES.get(service, ()), "restarts"):
            yield subjects.telemetry(service, own, what)
            yield subjects.telemetry(service, "other", what)
    for what in permissions.OF_JOBS:
        yield subjects.telemetry("job", "x", what)


def stored() -> Iterator[str]:
    """Writes into every bucket, and what JetStream's interface can do to its stream."""
    own = [bucket for service, id in IDS.items() for bucket in permissions.buckets_of(service, id)]
    for bucket in (*own, *SHARED_BUCKETS):
        yield f"$KV.{bucket}.key"
        for verb in ("CREATE", "UPDATE", "INFO", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE"):
            yield f"$JS.API.STREAM.{verb}.KV_{bucket}"
        yield f"$JS.API.CONSUMER.CREATE.KV_{bucket}"
    yield from ("$JS.API.STREAM.DELETE.facts", "$JS.API.CONSUMER.CREATE.facts", "$JS.API.INFO")
    yield from ("$O.code.M.x", "$JS.API.STREAM.DELETE.OBJ_code", "$SRV.PING")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats", guarded=True, users=["owner", *USERS]) as started:
        yield started


@asynccontextmanager
async def connected(server: NatsServer, user: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url_of(user), user)
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.parametrize("user", USERS)
async def test_a_user_may_do_what_is_declared_and_nothing_else(
    server: NatsServer, user: str
) -> None:
    grants = BusUser(user).grants()
    everything = [
        each
        for each in dict.fromkeys((*asked(), *said(), *stored()))
        # Deleting would succeed where it is allowed.
        if "STREAM.DELETE" not in each or not permitted(grants.publish, each)
    ]
    refused: list[str] = []
    async with connected(server, user) as bus:
        note = bus._forbid

        def noted(listens: bool, subject: str) -> None:
            refused.append(("listen " if listens else "publish ") + subject)
            note(listens, subject)

        bus._forbid = noted  # type: ignore[method-assign]
        for subject in everything:
            await bus.client.publish(subject, b"{}")
            await bus.client.subscribe(subject, cb=_ignored)
        with pytest.raises(AccessRefused):  # The library's own flush may overtake what was sent.
            await bus.flush()
    declared = {
        *(f"publish {each}" for each in everything if not permitted(grants.publish, each)),
        *(f"listen {each}" for each in everything if not permitted(grants.listen, each)),
    }
    assert set(refused) == {each.lower() for each in declared}
    assert len(declared) > len(everything)  # Each user is refused most things.


async def _ignored(_: Any) -> None:
    pass


async def test_a_refused_request_ends_at_once_with_the_reason(server: NatsServer) -> None:
    async with connected(server, "aggregator-a1") as bus:
        with pytest.raises(
            AccessRefused, match=r"sw\.v1\.cmd\.master\.main\.submit: .* may not ask"
        ):
            await bus.request("sw.v1.cmd.master.main.submit", b"", timeout_s=60.0)
        await bus.subscribe("sw.v1.cmd.worker.w1.start", _ignored)
        with pytest.raises(
            AccessRefused, match=r"sw\.v1\.cmd\.worker\.w1\.start: .* may not listen"
        ):
            await bus.flush()
        assert bus.counters.forbidden == 2


async def test_nobody_hears_the_answers_to_another_user(server: NatsServer) -> None:
    async with connected(server, "aggregator-a1") as bus, connected(server, "operator") as operator:
        for subject in (f"{operator._inbox}.>", "_INBOX.>", ">"):
            await bus.client.subscribe(subject, cb=_ignored)
        with pytest.raises(AccessRefused):
            await bus.flush()
        assert bus.counters.forbidden == 3


async def test_a_service_answers_where_it_was_asked_and_nowhere_else(server: NatsServer) -> None:
    async with connected(server, "worker-w1") as bus:
        await bus.client.publish("_INBOX_operator.x", b"forged")
        await bus.flush()
        assert bus.counters.forbidden == 1


async def test_the_server_tells_the_tenant_that_a_user_is_held_to(server: NatsServer) -> None:
    found = {}
    for user in ("tenant-red", "operator", "owner", "worker-w1"):
        async with connected(server, user) as bus:
            found[user] = await tenant_of(bus)
    assert found == {"tenant-red": "red", "operator": "", "owner": "", "worker-w1": ""}


async def test_a_tenant_asks_in_no_other_tenants_name(server: NatsServer) -> None:
    async with connected(server, "tenant-red") as bus:
        with pytest.raises(AccessRefused):
            await bus.request("sw.v1.own.blue.master.main.list", b"", timeout_s=5.0)
        with pytest.raises(NobodyThere):  # It may, and no master is there.
            await bus.request("sw.v1.own.red.master.main.list", b"", timeout_s=5.0)


async def test_who_has_no_secret_is_not_let_in(server: NatsServer) -> None:
    place = server.url.partition("@")[2]
    for url in (f"nats://{place}", f"nats://owner:guess@{place}", f"nats://nobody:x@{place}"):
        with pytest.raises(ConfigRejected, match="refuses"):
            await NatsBus.connect(url, "stranger")
