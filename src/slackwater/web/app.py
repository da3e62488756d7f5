"""The dashboard's server: the page, a stream of changes, jobs one by one, and actions if allowed.

Everything is read-only, but for actions of people who signed in as users of the bus. Whoever asks
must have the key, if there is one: logs are nobody else's business.
"""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.client import logs
from slackwater.client.worker_service import Worker, place_of
from slackwater.common.base.errors import NobodyThere, Rejected, Retryable, SlackwaterError
from slackwater.console.documents import whole
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.logs import TAIL_LINES_MAX
from slackwater.web import page, rows
from slackwater.web.sessions import Session, Sessions
from slackwater.web.watch import Watch

KEY_COOKIE: Final = "slackwater_key"
SESSION_COOKIE: Final = "slackwater_session"
STREAMS_MAX: Final = 64
PACE_S: Final = 0.5
"""Seconds between two messages of a stream, at least."""
ALIVE_S: Final = 10.0
"""Seconds after which a stream without news says that it lives."""
BODY_BYTES_MAX: Final = 4096
SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
ACTIONS: Final = ("pause", "resume", "cancel", "rerun")


class Dashboard:
    """Answers requests about what a `Watch` sees."""

    def __init__(self, watch: Watch, sessions: Sessions | None, name: str) -> None:
        """`sessions`: None where nobody may act. `name`: the cluster's, for the page's title."""
        self._watch = watch
        self._sessions = sessions
        self._name = name
        self._boot = secrets.token_hex(4)
        self._streams = 0

    def application(self, key: str) -> Starlette:
        """Return the application. `key`: what a request must show; empty: nothing."""
        routes = [
            Route("/", self.index),
            Route("/files/{name:path}", self.file),
            Route("/api/stream", self.stream),
            Route("/api/jobs/{job}", self.job),
            Route("/api/jobs/{job}/log", self.log),
            Route("/api/state", self.state),
        ]
        if self._sessions is not None:
            routes += [
                Route("/api/session", self.sign_in, methods=["POST"]),
                Route("/api/session", self.sign_out, methods=["DELETE"]),
                Route("/api/jobs/{job}/{action}", self.act, methods=["POST"]),
            ]
        guard = Middleware(Guard, key=key)
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            SlackwaterError: _refused,
            HTTPException: _wrong,
        }
        return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)

    # The page -------------------------------------------------------------------------------------

    async def index(self, request: Request) -> Response:
        return HTMLResponse(page.served(f"{self._name} - Slackwater"))

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in page.files():
            raise HTTPException(404, f"there is no file {name}")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(page.text(name), media_type=kind, headers={"Cache-Control": "no-cache"})

    # Views ----------------------------------------------------------------------------------------

    async def state(self, request: Request) -> Response:
        """Return everything at once, for scripts."""
        return answer(self._message(0))

    async def stream(self, request: Request) -> Response:
        """Send what there is, and then what changes, as server-sent events. A page that comes back
        says what it has seen."""
        if self._streams >= STREAMS_MAX:
            return problem(503, f"{STREAMS_MAX} pages are open: close one", 10.0)
        boot, _, version = request.headers.get("last-event-id", "").partition(":")
        seen = int(version) if boot == self._boot and version.isdigit() else 0
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            self._changes(seen), media_type="text/event-stream", headers=headers
        )

    async def _changes(self, seen: int) -> AsyncGenerator[bytes, None]:
        watch, board = self._watch, self._watch.board
        self._streams += 1
        try:
            yield b"retry: 2000\n\n"
            while True:
                message = self._message(seen)
                seen = board.version
                body = msgspec.json.encode(message)
                yield b"id: %s:%d\ndata: %s\n\n" % (self._boot.encode(), seen, body)
                await watch.client.clock.sleep_until(watch.client.clock.now_s() + PACE_S)
                while not await watch.changed(seen, ALIVE_S):
                    yield b": alive\n\n"
        finally:
            self._streams -= 1

    def _message(self, seen: int) -> dict[str, Any]:
        board = self._watch.board
        seen = seen if board.knows(seen) else 0
        return {
            "kind": "live",
            "name": self._name,
            "acts": self._sessions is not None,
            "tenant": self._watch.client.tenant,
            "whole": seen == 0,
            "version": board.version,
            "now_s": self._watch.client.clock.now_s(),
            "changes": board.since(seen),
        }

    async def job(self, request: Request) -> Response:
        """Return a job's page; `?record`: its whole record, too."""
        job, watch = request.path_params["job"], self._watch
        info = await watch.client.job_info(job)
        found = rows.job_page(info, watch.life_of(job), watch.events_of(job))
        if "record" in request.query_params:
            found["record"] = whole(info.job)
        return answer(found | {"now_s": watch.client.clock.now_s()})

    async def log(self, request: Request) -> Response:
        """Return a piece of what a rank printed: from `offset` on, else its last `tail` lines."""
        query = request.query_params
        rank = _number(query, "rank", 0, 1_000_000)
        tail = _number(query, "tail", 200, TAIL_LINES_MAX)
        offset = _number(query, "offset", 0, 2**62) if "offset" in query else None
        client = self._watch.client
        record = await logs.started(client, request.path_params["job"], patient=False)
        if rank not in logs.ranks_of(record):
            raise HTTPException(404, f"rank {rank}: the job has {len(logs.ranks_of(record))}")
        piece = await Worker(client, record, rank).piece(offset, tail, patient=False)
        return answer(
            {
                "start": piece.start,
                "next": piece.start + len(piece.data),
                "text": piece.data.decode(errors="replace"),
                "begin": piece.begin,
                "ended": piece.ended,
                "code": piece.code if piece.ended else None,
                "node": place_of(record, rank),
            }
        )

    # Actions --------------------------------------------------------------------------------------

    async def sign_in(self, request: Request) -> Response:
        """Take {user, password} or {token}: what the bus knows the user by."""
        assert self._sessions is not None
        _same_origin(request)
        given = await _body(request)
        user, password, token = (str(given.get(name, "")) for name in ("user", "password", "token"))
        if not (token or (user and password)):
            raise HTTPException(400, "give user and password, or token")
        try:
            secret = await self._sessions.open(user, password, token)
        except Rejected as error:
            return problem(403, str(error))
        response = answer({"user": user or "by token"})
        response.set_cookie(SESSION_COOKIE, secret, httponly=True, samesite="strict")
        return response

    async def sign_out(self, request: Request) -> Response:
        assert self._sessions is not None
        _same_origin(request)
        await self._sessions.close(request.cookies.get(SESSION_COOKIE, ""))
        response = answer({})
        response.delete_cookie(SESSION_COOKIE)
        return response

    async def act(self, request: Request) -> Response:
        """Pause, resume, cancel or run again, as the user who signed in."""
        _same_origin(request)
        session = self._session(request)
        job, action = request.path_params["job"], request.path_params["action"]
        if action not in ACTIONS:
            raise HTTPException(404, f"action {action}: choose one of {', '.join(ACTIONS)}")
        record = await _acted(session, job, action)
        return answer({"job": job, "state": record.state, "reason": record.reason})

    def _session(self, request: Request) -> Session:
        assert self._sessions is not None
        session = self._sessions.find(request.cookies.get(SESSION_COOKIE, ""))
        if session is None:
            raise HTTPException(401, "sign in first: actions are done as a user of the bus")
        return session


async def _acted(session: Session, job: str, action: str) -> JobRecord:
    client = session.client
    match action:
        case "pause":
            return await client.pause(job)
        case "resume":
            return await client.resume(job)
        case "rerun":
            return await client.run_again(job)
        case _:
            await client.cancel(job)
            return await client.job(job)


class Guard:
    """Lets in who shows the key: in the address once, then in a cookie, or as a bearer's token."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (name.lower().encode(), value.encode()) for name, value in SECURITY.items()
                ]
            await send(message)

        shown = request.query_params.get("key", "")
        if self._key and request.url.path == "/" and self._is(shown):
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(KEY_COOKIE, self._key, httponly=True, samesite="lax")
            await response(scope, receive, secured)
        elif self._key and not self._shown(request):
            text = "this page needs the key: open the address that `slackwater web` printed"
            await problem(403, text)(scope, receive, secured)
        else:
            await self._app(scope, receive, secured)

    def _shown(self, request: Request) -> bool:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        return self._is(request.cookies.get(KEY_COOKIE, "")) or (
            kind.lower() == "bearer" and self._is(token)
        )

    def _is(self, shown: str) -> bool:
        return secrets.compare_digest(shown.encode(), self._key.encode())


def answer(value: Any, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def problem(status: int, text: str, retry_after_s: float = 0.0) -> Response:
    """Refuse, with the reason and when to try again."""
    response = answer({"error": text, "retry_after_s": retry_after_s}, status)
    if retry_after_s:
        response.headers["Retry-After"] = str(round(retry_after_s))
    return response


async def _refused(request: Request, error: SlackwaterError) -> Response:
    if isinstance(error, Retryable):
        away = isinstance(error, NobodyThere)
        return problem(503 if away else 504, str(error), max(1.0, error.retry_after_s))
    status = error.status if isinstance(error, Rejected) else 500
    return problem(status, str(error))


async def _wrong(request: Request, error: HTTPException) -> Response:
    return problem(error.status_code, error.detail)


def _same_origin(request: Request) -> None:
    """Raises HTTPException where another site sent the request."""
    origin = request.headers.get("origin")
    here = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if origin is not None and origin != here:
        raise HTTPException(403, f"a page of {origin} may not act here")


async def _body(request: Request) -> dict[str, Any]:
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > BODY_BYTES_MAX:
            raise HTTPException(413, f"give at most {BODY_BYTES_MAX} bytes")
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise HTTPException(400, "give an object")
    return found


def _number(query: Any, name: str, default: int, most: int) -> int:
    text = query.get(name, str(default))
    if not text.isdigit() or int(text) > most:
        raise HTTPException(400, f"{name} {text!r}: give a whole number from 0 to {most}")
    return int(text)
