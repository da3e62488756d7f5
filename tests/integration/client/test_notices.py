"""Notices to a webhook: once each and in order, through a receiver that is away and a restart."""

import asyncio
import hashlib
import hmac
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import soon

from slackwater.client import AsyncClient
from slackwater.client.notifying import Notice, Refused, notify, post
from slackwater.common.base.errors import ConfigRejected, Retryable
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster
from slackwater.schemas.jobs import JobSpec


class Receiver(ThreadingHTTPServer):
    """Takes notices; answers the next ones with `answers` first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[int] = []
        self.taken: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Receiver)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        code = server.answers.pop(0) if server.answers else 200
        if code == 200:
            server.taken.append(json.loads(body))
            server.headers.append(dict(self.headers))
            server.bodies.append(body)
        self.send_response(code)
        if code == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def test_answers_say_whether_it_is_sent_again(receiver: Receiver) -> None:
    notice = Notice("a failed", "a", "failed", 1.0, 7)
    for code, error in ((500, Retryable), (429, Retryable), (404, Refused), (302, Refused)):
        receiver.answers = [code]
        with pytest.raises(error, match=str(code)):
            post(receiver.url, notice, b"")
    post(receiver.url, notice, b"secret")
    assert receiver.taken == [
        {"text": "a failed", "job": "a", "fact": "failed", "at_s": 1.0, "sequence": 7}
    ]
    signed = hmac.new(b"secret", receiver.bodies[0], hashlib.sha256).hexdigest()
    assert receiver.headers[0]["X-Slackwater-Signature"] == f"sha256={signed}"
    assert receiver.headers[0]["Idempotency-Key"] == "slackwater-7"
    with pytest.raises(Retryable):
        post("http://127.0.0.1:9/", notice, b"")


@pytest.mark.live
async def test_each_end_is_told_once_through_restarts(receiver: Receiver, tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with (
        EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as cluster,
        AsyncClient.connect(cluster.url) as client,
    ):

        async def ends(id: str, code: int) -> None:
            await client.submit(JobSpec(id=id, program=(sys.executable, "-c", f"exit({code})")))
            await client.wait(id, timeout_s=60.0)

        async def telling(wanted: tuple[str, ...]) -> asyncio.Task[None]:
            return asyncio.create_task(notify(client, receiver.url, wanted=wanted, state=state))

        def told() -> list[tuple[str, str]]:
            # One whose answer was lost, with a service that ended, comes again under its number.
            unique = {each["sequence"]: (each["job"], each["fact"]) for each in receiver.taken}
            return list(unique.values())

        await ends("before", 1)
        one = await telling(("failed", "completed"))
        await asyncio.sleep(0.5)  # It begins with what comes from now on.
        receiver.answers = [503, 503]
        await ends("bad", 3)
        await ends("good", 0)
        await soon(lambda: told() == [("bad", "failed"), ("good", "completed")])
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        await ends("meanwhile", 2)
        two = await telling(("failed", "completed"))
        await soon(lambda: told()[2:] == [("meanwhile", "failed")])
        two.cancel()
        await asyncio.gather(two, return_exceptions=True)
        assert state.stat().st_mode & 0o777 == 0o600
        state.write_text("{}")
        with pytest.raises(ConfigRejected, match="remove it to begin anew"):
            await notify(client, receiver.url, wanted=(), state=state)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--to", "ftp://x"), 78, "give an address such as https://"),
        (("--to", "http://x/", "--on", "exploded"), 2, "--on 'exploded': choose of completed"),
        (("--to", "http://x/", "--secret-file", "/nosuch"), 78, "--secret-file /nosuch"),
    ],
)
def test_bad_options_say_what_to_do(words: tuple[str, ...], code: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slackwater.cli.main", "notify", *words],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
