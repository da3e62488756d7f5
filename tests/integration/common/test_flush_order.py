"""A flush is answered after everything that was sent before it: subscriptions, then facts."""

from collections.abc import Callable
from typing import Any

import pytest

from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.nats import NatsBus

pytestmark = pytest.mark.live


@pytest.fixture
def written(nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that the client writes to its socket, in order."""
    lines: list[bytes] = []
    transport: Any = nats_bus.client._transport

    def recording(write: Callable[[Any], None], many: bool) -> Callable[[Any], None]:
        def record(data: Any) -> None:
            lines.extend(b"".join(data if many else [data]).splitlines())
            write(data)

        return record

    monkeypatch.setattr(transport, "write", recording(transport.write, False))
    monkeypatch.setattr(transport, "writelines", recording(transport.writelines, True))
    return lines


async def test_a_service_that_serves_can_be_asked(nats_bus: NatsBus, written: list[bytes]) -> None:
    """Every SUB is on the wire before the PING whose answer `serve` waits for."""

    async def respond(_: Delivery) -> bytes:
        return b""

    endpoints = [Endpoint(f"e{n}", f"flush.e{n}", respond, {}, 1) for n in range(20)]
    await nats_bus.serve(ServiceInfo("flush", "0.1.0", "", {}), endpoints)
    subscribed = [index for index, line in enumerate(written) if line.startswith(b"SUB ")]
    assert len(subscribed) >= 20
    assert written.index(b"PING") > max(subscribed)


async def test_what_was_published_is_out_when_flush_returns(
    nats_bus: NatsBus, written: list[bytes]
) -> None:
    for number in range(10):
        await nats_bus.publish(f"flush.fact.{number}", b"x")
    await nats_bus.flush()
    facts = [index for index, line in enumerate(written) if line.startswith(b"PUB flush.fact")]
    assert len(facts) == 10
    assert written.index(b"PING") > max(facts)
