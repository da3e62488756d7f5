"""Traces: which request led to which others, through all services.

A message may come with a trace context (W3C Trace Context, the header `traceparent`). Messages that
are sent while it is worked on carry the context on, and log lines name the trace. That needs no
library, and costs nothing where no message came with one. A process that has a `Tracer` (otel.py)
also records spans: each request that it answers, and each that it makes.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Final, Literal, Protocol, TypeVar

A = TypeVar("A")

HEADER: Final = "traceparent"
VARIABLE: Final = "TRACEPARENT"
"""Hands a context to a program in its environment, as other tools do."""
_FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
_current: ContextVar[str] = ContextVar("trace", default="")
_open: ContextVar["Span | None"] = ContextVar("span", default=None)
_tracer: "Tracer | None" = None


class Span(Protocol):
    header: str
    """Its context, for what it leads to."""

    def tag(self, name: str, value: str) -> None: ...

    def end(self, error: str) -> None:
        """`error`: why it failed; empty: it did not."""
        ...


class Tracer(Protocol):
    """Records spans."""

    def begin(self, name: str, kind: Literal["server", "client"], parent: str) -> Span:
        """`parent`: the context that it is part of; empty: it begins a trace."""
        ...


def install(tracer: Tracer | None) -> None:
    """Let this process record spans; None: no longer."""
    global _tracer
    _tracer = tracer


def current() -> str:
    """Return the context of what is being done; empty: it is part of no trace."""
    return _current.get()


def trace_id() -> str:
    """Return the id of the trace of what is being done; empty: it is part of none."""
    return _current.get()[3:35]


def valid(header: str) -> str:
    """Return a context that somebody sent, empty where it is none: then a new trace begins."""
    return header if header and _FORM.fullmatch(header) else ""


class under:
    """Do something as part of this trace; empty: as part of none."""

    __slots__ = ("_header", "_token")

    def __init__(self, header: str) -> None:
        self._header = header

    def __enter__(self) -> None:
        self._token = _current.set(self._header)

    def __exit__(self, *_error: object) -> None:
        _current.reset(self._token)


class Work:
    """A request that is answered or made. What is done within `with` is part of its trace."""

    __slots__ = ("_header", "_span", "_tokens")

    def __init__(self, header: str, span: Span | None) -> None:
        self._header, self._span = header, span
        self._tokens: tuple[Token[str], Token[Span | None]] | None = None

    def __enter__(self) -> "Work":
        self._tokens = _current.set(self._header), _open.set(self._span)
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._tokens is not None
        _current.reset(self._tokens[0])
        _open.reset(self._tokens[1])

    def end(self, error: str = "") -> None:
        if self._span is not None:
            self._span.end(error)


def headers(others: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Return a message's headers: these, and the present context. None: it has none."""
    header = _current.get()
    if not header:
        return dict(others) if others else None
    return {**(others or {}), HEADER: header}


async def ask(subject: str, request: Callable[[], Awaitable[A]]) -> A:
    """Await what `request` gives, as one request that is made."""
    if not (_tracer or _current.get()):
        return await request()
    with whole(name_of(subject), _current.get()):
        return await request()


@contextmanager
def whole(name: str, header: str) -> Iterator[None]:
    """Do some work from its begin to its end; `header`: what it may be part of."""
    work = _begin(name, "client", valid(header))
    if work is None:
        yield
        return
    with work:
        try:
            yield
        except BaseException as error:  # A cancelled one, too, has ended.
            work.end(str(error) or type(error).__name__)
            raise
    work.end()


def answering(subject: str, header: str) -> Work | None:
    """Begin with a request that came with this context. None: there is nothing to trace."""
    if not (_tracer or header):
        return None
    return _begin(name_of(subject), "server", valid(header))


def recorded() -> bool:
    """Say whether what is done has a span that is recorded."""
    return _open.get() is not None


def tag(name: str, value: str) -> None:
    """Say of the span that is open what it is about; nothing where none is recorded."""
    span = _open.get()
    if span is not None:
        span.tag(name, value)


def _begin(name: str, kind: Literal["server", "client"], parent: str) -> Work | None:
    if _tracer is not None:
        span = _tracer.begin(name, kind, parent)
        return Work(span.header, span)
    return Work(parent, None) if parent else None


def name_of(subject: str) -> str:
    """Return the service and the verb of a command's subject: as few names as there are verbs."""
    tokens = subject.split(".")
    return f"{tokens[-3]}.{tokens[-1]}" if len(tokens) > 4 else subject
