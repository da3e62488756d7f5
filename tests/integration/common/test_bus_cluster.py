"""A bus of three servers, and an encrypted one. Electing a leader among servers takes seconds."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.certificates import make_certificates, needs_openssl
from tests.eventually import eventually
from tests.integration.common.bus_cluster import BusCluster

from slackwater.common.base.errors import ConfigRejected, Retryable, Unavailable
from slackwater.common.bus.access import Credentials, Tls
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.store.base import Bucket
from slackwater.common.store.nats import NatsStore

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


async def _append(bucket: Bucket, key: str) -> None:
    """Write the key once, whatever becomes of acknowledgements."""
    if await bucket.get(key) is None:
        await bucket.put(key, key.encode(), expected_last=await bucket.last_sequence())


@pytest.mark.slow
async def test_no_acknowledged_record_is_lost_with_one_server_of_three(tmp_path: Path) -> None:
    with BusCluster(tmp_path) as cluster:
        bus = await eventually(lambda: NatsBus.connect(cluster.url, "writer"))
        bucket = await eventually(lambda: NatsStore(bus, replicas=3).bucket("jobs"))
        acknowledged = []
        for number in range(3):  # Each once: among them whoever leads.
            for n in range(5):
                key = f"k{number}-{n}"
                await eventually(lambda key=key: _append(bucket, key))
                acknowledged.append(key)
            cluster.kill(number)
            key = f"without-{number}"
            await eventually(lambda key=key: _append(bucket, key))
            acknowledged.append(key)
            cluster.start(number)
            await asyncio.sleep(2.0)  # It catches up before the next one is lost.
        entries, *_ = await eventually(bucket.load)
        assert set(acknowledged) <= set(entries)
        answer = await bus.call("$JS.API.STREAM.INFO.KV_jobs", b"", timeout_s=5.0)
        assert json.loads(answer.data)["config"]["num_replicas"] == 3
        await bus.close()


@pytest.mark.slow
async def test_what_was_stored_on_one_server_is_copied_to_three(tmp_path: Path) -> None:
    """`replicas` was raised, and counted for new buckets alone."""
    with BusCluster(tmp_path) as cluster:
        bus = await eventually(lambda: NatsBus.connect(cluster.url, "writer"))
        alone = await eventually(lambda: NatsStore(bus).bucket("jobs"))
        await eventually(lambda: _append(alone, "before"))
        bucket = await eventually(lambda: NatsStore(bus, replicas=3).bucket("jobs"))
        answer = await bus.call("$JS.API.STREAM.INFO.KV_jobs", b"", timeout_s=5.0)
        assert json.loads(answer.data)["config"]["num_replicas"] == 3
        entries, *_ = await eventually(bucket.load)
        assert set(entries) == {"before"}
        await eventually(lambda: NatsStore(bus).bucket("jobs"))  # Fewer are not made of them.
        answer = await bus.call("$JS.API.STREAM.INFO.KV_jobs", b"", timeout_s=5.0)
        assert json.loads(answer.data)["config"]["num_replicas"] == 3
        await bus.close()


@pytest.mark.slow
async def test_two_of_three_lost_is_a_refusal_and_then_all_goes_on(tmp_path: Path) -> None:
    with BusCluster(tmp_path) as cluster:
        bus = await eventually(lambda: NatsBus.connect(cluster.url, "writer"))
        bucket = await eventually(lambda: NatsStore(bus, replicas=3).bucket("jobs"))
        await eventually(lambda: _append(bucket, "before"))
        cluster.kill(0)
        cluster.kill(1)
        with pytest.raises(Retryable):
            await _append(bucket, "between")
        cluster.start(0)
        await eventually(lambda: _append(bucket, "after"))
        assert await eventually(lambda: bucket.get("before")) is not None
        await bus.close()


class EncryptedServer(NatsServer):
    """A nats-server with a certificate of an authority of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "nats")
        self.files = make_certificates(folder)

    def _config(self) -> str:
        files = f'cert_file: "{self.files.certificate}", key_file: "{self.files.key}"'
        return super()._config() + f"tls {{ {files} }}\n"


@needs_openssl
async def test_an_encrypted_bus_is_trusted_by_its_authority_alone(tmp_path: Path) -> None:
    trusted = Credentials().trusting(Tls(ca=str(tmp_path / "ca.pem")))
    with EncryptedServer(tmp_path) as server:
        url = server.url
        assert url.startswith("tls://")
        bus = await NatsBus.connect(url, "one", credentials=trusted)
        await bus.flush()
        await bus.close()
        with pytest.raises(ConfigRejected, match=r"not to be trusted: .*certificate verify failed"):
            await NatsBus.connect(url, "one")


async def test_nothing_is_said_to_a_server_that_does_not_encrypt(
    own_nats_server: NatsServer,
) -> None:
    url = own_nats_server.url.replace("nats://", "tls://user:secret@")
    with pytest.raises(ConfigRejected, match="it does not encrypt") as caught:
        await NatsBus.connect(url, "one")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("tls", "why"),
    [
        (Tls(ca="/nowhere"), "cannot be found"),
        (Tls(certificate="/etc/hostname"), "without key"),
        (Tls(ca="/etc/hostname"), "holds no certificate"),
    ],
)
async def test_files_that_are_no_certificates_are_named(tls: Tls, why: str) -> None:
    with pytest.raises(ConfigRejected, match=why):
        await NatsBus.connect("tls://127.0.0.1:1", "one", credentials=Credentials().trusting(tls))


async def test_a_list_of_servers_is_tried_to_its_end(own_nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(f"nats://127.0.0.1:1,{own_nats_server.url}", "one")
    await bus.close()
    with pytest.raises(Unavailable):
        await NatsBus.connect("nats://127.0.0.1:1,nats://127.0.0.1:2", "one")
    with pytest.raises(ConfigRejected, match="http"):
        await NatsBus.connect("http://127.0.0.1:1", "one")
