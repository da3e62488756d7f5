"""The dashboard's server without a network: who is let in, what is refused, and how it says so."""

import asyncio
import json
from typing import Any, cast

import pytest

from slackwater.client import AsyncClient
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.bus.access import Tls
from slackwater.common.bus.memory import MemoryBroker
from slackwater.schemas.base import NOT_FOUND
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.web import app as app_of
from slackwater.web import page
from slackwater.web.app import KEY_COOKIE, SESSION_COOKIE, Dashboard
from slackwater.web.sessions import Session, Sessions
from slackwater.web.watch import Watch

KEY = "k" * 32


class Answers(AsyncClient):
    """Knows one job, and notes what it is told to do."""

    def __init__(self) -> None:
        clock = LiveClock()
        super().__init__(MemoryBroker(1, clock=clock).connect("test"), clock)
        self.done: list[str] = []
        self.away = False

    async def job_info(self, job: str) -> JobInfo:
        if self.away:
            raise Unavailable("no master answers", 5.0)
        if job != "j":
            error = Rejected(f"there is no job {job}")
            error.status = NOT_FOUND
            raise error
        return JobInfo(job=JobRecord(spec=JobSpec(id="j"), state="running"))

    async def pause(self, job: str, waiting: bool = False) -> JobRecord:
        self.done.append(f"pause {job}")
        return JobRecord(spec=JobSpec(id=job), state="paused")

    async def cancel(self, job: str) -> None:
        self.done.append(f"cancel {job}")


class Site:
    """A dashboard, asked by hand."""

    def __init__(self, *, key: str = KEY, acts: bool = False) -> None:
        self.client = Answers()
        self.watch = Watch(self.client)
        self.sessions = Sessions("nats://127.0.0.1:9", Tls()) if acts else None
        self.app = Dashboard(self.watch, self.sessions, "test").application(key)

    async def ask(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        name, _, query = path.partition("?")
        sent: list[Any] = []
        names = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        scope = {
            "type": "http", "method": method, "path": name, "raw_path": name.encode(),
            "query_string": query.encode(), "headers": [(b"host", b"here"), *names],
            "scheme": "http", "server": ("here", 80), "client": ("127.0.0.1", 1),
            "http_version": "1.1", "root_path": "",
        }  # fmt: skip

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(cast(Any, scope), receive, send)
        head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return sent[0]["status"], head, b"".join(each.get("body", b"") for each in sent[1:])

    async def json(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        status, _, body = await self.ask(path, method, **headers)
        return status, json.loads(body)


async def test_the_key_opens_the_page_once_and_a_cookie_from_then_on() -> None:
    site = Site()
    for headers in ({}, {"cookie": f"{KEY_COOKIE}=wrong"}, {"authorization": "Bearer wrong"}):
        status, told = await site.json("/api/state", **headers)
        assert (status, told["error"].partition(":")[0]) == (403, "this page needs the key")
    status, head, _ = await site.ask(f"/?key={KEY}")
    assert (status, head["location"]) == (303, "/")
    cookie = head["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    status, head, body = await site.ask("/", cookie=f"{KEY_COOKIE}={KEY}")
    assert status == 200
    assert b"/files/static/main.js" in body
    assert "default-src 'none'" in head["content-security-policy"]
    status, told = await site.json("/api/state", authorization=f"Bearer {KEY}")
    assert (status, told["kind"], told["acts"]) == (200, "live", False)
    assert (await site.ask("/?key=wrong"))[0] == 403


async def test_without_a_key_everybody_reads() -> None:
    site = Site(key="")
    assert (await site.json("/api/state"))[0] == 200


@pytest.mark.parametrize("name", ["static/main.js", "static/style.css", *page.SCRIPTS[:1]])
async def test_files_of_the_page_are_served(name: str) -> None:
    status, _, body = await Site(key="").ask(f"/files/{name}")
    assert status == 200
    assert len(body) > 500


@pytest.mark.parametrize("name", ["app.py", "../cli/web.py", "static/../app.py", "nosuch.js"])
async def test_and_no_others(name: str) -> None:
    status, told = await Site(key="").json(f"/files/{name}")
    assert status == 404
    assert "there is no file" in told["error"]


async def test_a_job_has_a_page_or_a_reason_why_not() -> None:
    site = Site(key="")
    status, told = await site.json("/api/jobs/j?record")
    assert (status, told["job"]["state"], told["record"]["state"]) == (200, "running", "running")
    status, told = await site.json("/api/jobs/nosuch")
    assert (status, told["error"]) == (404, "there is no job nosuch")
    site.client.away = True
    status, head, body = await site.ask("/api/jobs/j")
    assert (status, head["retry-after"]) == (504, "5")
    assert json.loads(body)["retry_after_s"] == 5.0


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("rank=x", "rank 'x': give a whole number"),
        ("tail=-1", "tail '-1'"),
        ("offset=99999999999999999999", "offset"),
    ],
)
async def test_numbers_in_addresses_are_checked(query: str, says: str) -> None:
    status, told = await Site(key="").json(f"/api/jobs/j/log?{query}")
    assert status == 400
    assert says in told["error"]


async def test_nobody_acts_where_nobody_may() -> None:
    status, _ = await Site(key="").json("/api/jobs/j/cancel", "POST")
    assert status in (404, 405)
    status, _ = await Site(key="").json("/api/session", "POST")
    assert status in (404, 405)


async def test_actions_need_a_session_and_come_from_this_page() -> None:
    site = Site(key="", acts=True)
    status, told = await site.json("/api/jobs/j/cancel", "POST")
    assert (status, told["error"].partition(":")[0]) == (401, "sign in first")
    assert site.sessions is not None
    acting = Answers()
    secret = "s" * 20
    site.sessions._sessions[secret] = Session(  # Made without a bus.
        acting, "op", acting.clock.now_s(), cast(Any, app_of)
    )
    cookie = f"{SESSION_COOKIE}={secret}"
    status, told = await site.json("/api/jobs/j/pause", "POST", cookie=cookie)
    assert (status, told["state"]) == (200, "paused")
    status, told = await site.json(
        "/api/jobs/j/pause", "POST", cookie=cookie, origin="http://elsewhere"
    )
    assert (status, told["error"]) == (403, "a page of http://elsewhere may not act here")
    status, told = await site.json("/api/jobs/j/explode", "POST", cookie=cookie)
    assert (status, told["error"].partition(":")[0]) == (404, "action explode")
    assert acting.done == ["pause j"], "as who signed in, and once"
    assert site.client.done == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"[]", "give an object"),
        (b'{"user": "a"}', "give user and password, or token"),
        (b'{"a": "' + b"x" * 9000 + b'"}', "4096 bytes"),
    ],
)
async def test_signing_in_says_what_is_missing(body: bytes, says: str) -> None:
    status, _, told = await Site(key="", acts=True).ask("/api/session", "POST", body)
    assert status in (400, 413)
    assert says in json.loads(told)["error"]


async def test_more_streams_than_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_of, "STREAMS_MAX", 0)
    status, head, told = await Site(key="").ask("/api/stream")
    assert (status, head["retry-after"]) == (503, "10")
    assert "close one" in json.loads(told)["error"]


async def test_a_stream_goes_on_where_the_page_was() -> None:
    site = Site(key="")
    dashboard = Dashboard(site.watch, None, "test")
    site.watch.board.put("jobs", "a", 1)
    stream = dashboard._changes(0)
    assert await anext(stream) == b"retry: 2000\n\n"
    first = await anext(stream)
    head, _, body = first.partition(b"\ndata: ")
    assert head == f"id: {dashboard._boot}:1".encode()
    told = json.loads(body)
    assert (told["whole"], told["changes"]) == (True, {"jobs": {"a": 1}})
    site.watch.board.put("jobs", "b", 2)
    site.watch._tell()
    told = json.loads((await anext(stream)).partition(b"\ndata: ")[2])
    assert (told["whole"], told["changes"]) == (False, {"jobs": {"b": 2}})
    await stream.aclose()
    assert dashboard._streams == 0
    again = dashboard._changes(1)
    await anext(again)
    told = json.loads((await anext(again)).partition(b"\ndata: ")[2])
    assert told["changes"] == {"jobs": {"b": 2}}
    await again.aclose()
    assert await asyncio.wait_for(site.watch.changed(0, 1.0), 2.0)
    assert not await site.watch.changed(2, 0.01)
