"""Traces through services: what a request leads to is part of its trace, and nothing else is."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.common.shell.ledger import Ask, Later, Running, simulate

from slackwater.common.base import tracing
from slackwater.common.base.effects import Effect, Persist, TimerFired
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.world import SimWorld
from slackwater.schemas.base import Ok


def context(number: int, span: int = 1) -> str:
    return f"00-{number:032x}-{span:016x}-01"


@dataclass
class SpanInMemory:
    name: str
    kind: str
    parent: str
    header: str
    tags: dict[str, str] = field(default_factory=dict)
    ended: str | None = None

    def tag(self, name: str, value: str) -> None:
        self.tags[name] = value

    def end(self, error: str) -> None:
        assert self.ended is None, "a span ends once"
        self.ended = error


@dataclass
class TracerInMemory:
    spans: list[SpanInMemory] = field(default_factory=list)

    def begin(self, name: str, kind: Literal["server", "client"], parent: str) -> SpanInMemory:
        number = len(self.spans) + 1
        trace = parent[3:35] or f"{number:032x}"
        made = SpanInMemory(name, kind, parent, f"00-{trace}-{number:016x}-01")
        self.spans.append(made)
        return made


@pytest.fixture
def tracer() -> Iterator[TracerInMemory]:
    made = TracerInMemory()
    tracing.install(made)
    yield made
    tracing.install(None)


class Watched:
    """Two services, and the trace of each event that their cores saw and of each fact they told."""

    def __init__(self, sim: SimWorld) -> None:
        self.one, self.other = Running(sim, "l1"), Running(sim, "l2", buckets={})
        self.facts: list[Delivery] = []
        self.steps: list[tuple[str, str]] = []
        for service in (self.one, self.other):
            self._watch(service)

    def _watch(self, service: Running) -> None:
        step = service.core.step

        def seen(event: Any, now_s: float) -> list[Effect]:
            self.steps.append((type(event).__name__, tracing.current()))
            effects = step(event, now_s)
            return [each for each in effects if service is self.one or type(each) is not Persist]

        service.core.step = seen  # type: ignore[method-assign]

    async def ready(self) -> "Watched":
        await self.one.ready()
        await self.other.ready()

        async def heard(delivery: Delivery) -> None:
            self.facts.append(delivery)

        await self.one.client.bus.subscribe("sw.v1.evt.ledger.>", heard)
        return self

    async def end(self) -> None:
        assert [await self.one.end(), await self.other.end()] == [0, 0]


def test_what_a_request_leads_to_is_part_of_its_trace() -> None:
    """The fact leaves after its record is stored; the request to another service on a lane."""

    async def main() -> None:
        watched = await Watched(SimWorld(1)).ready()
        with tracing.under(context(7)):
            await watched.one.add("c1")
            await watched.one.ask("ask", Ask(to="l2"))
        await watched.one.add("c2", account="b")
        await asyncio.sleep(1.0)
        told = {fact.subject.split(".")[4]: fact.trace for fact in watched.facts}
        assert told == {"a": context(7), "asked": context(7), "b": ""}
        answered = [trace for name, trace in watched.steps if name == "Answered"]
        assert answered == [context(7)]
        await watched.end()

    simulate(main())


def test_requests_at_once_keep_their_traces_apart() -> None:
    async def main() -> None:
        watched = await Watched(SimWorld(2)).ready()

        async def add(number: int) -> None:
            with tracing.under(context(number) if number % 3 else ""):
                await watched.one.add("c", account=f"a{number}")

        await asyncio.gather(*(add(number) for number in range(1, 60)))
        await asyncio.sleep(1.0)
        told = {int(fact.subject.split(".")[4][1:]): fact.trace for fact in watched.facts}
        assert told == {n: context(n) if n % 3 else "" for n in range(1, 60)}
        await watched.end()

    simulate(main())


def test_a_timer_is_part_of_no_trace() -> None:
    """Else a service that ticks would be part of its first request's trace for ever."""

    async def main() -> None:
        watched = await Watched(SimWorld(3)).ready()
        with tracing.under(context(9)):
            assert isinstance(await watched.one.ask("later", Later(wait_s=1.0)), Ok)
        assert (TimerFired.__name__, "") in watched.steps
        assert (TimerFired.__name__, context(9)) not in watched.steps
        await watched.end()

    simulate(main())


def test_a_context_that_is_none_is_left_out() -> None:
    async def main() -> None:
        watched = await Watched(SimWorld(4)).ready()
        with tracing.under("00-what-ever-01"):
            await watched.one.add("c1")
        await asyncio.sleep(1.0)
        assert [fact.trace for fact in watched.facts] == [""]
        await watched.end()

    simulate(main())


def test_spans_make_a_tree_and_name_their_errors(tracer: TracerInMemory) -> None:
    async def main() -> None:
        watched = await Watched(SimWorld(5)).ready()
        del tracer.spans[:]
        with tracing.under(context(1 << 100, span=1 << 60)):
            await watched.one.ask("ask", Ask(to="l2"))
            await watched.one.ask("ask", Ask(to="nobody", budget_s=0.5))
        await watched.end()

    simulate(main())
    spans = {span.header: span for span in tracer.spans}
    assert {span.header[3:35] for span in tracer.spans} == {f"{1 << 100:032x}"}
    assert all(span.ended is not None for span in tracer.spans)

    def path(span: SpanInMemory) -> list[str]:
        above = spans.get(span.parent)
        return [*(path(above) if above is not None else []), f"{span.kind} {span.name}"]

    paths = [path(span) for span in tracer.spans]
    asked = ["client ledger.ask", "server ledger.ask", "client ledger.add"]
    assert [*asked, "server ledger.add"] in paths
    failed = [span for span in tracer.spans if span.ended]
    assert failed
    assert {span.name for span in failed} >= {"ledger.add"}
    assert all("nobody answers there" in str(span.ended) for span in failed)


def test_a_span_ends_however_its_work_ends(tracer: TracerInMemory) -> None:
    async def main() -> None:
        async def never() -> None:
            await asyncio.get_running_loop().create_future()

        asking = asyncio.ensure_future(tracing.ask("sw.v1.cmd.ledger.l1.add", never))
        await asyncio.sleep(1.0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    simulate(main())
    with pytest.raises(KeyError), tracing.whole("slackwater jobs", ""):
        raise KeyError("j1")
    assert [span.ended for span in tracer.spans] == ["CancelledError", "'j1'"]


# The header ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", ""),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", ""),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes-later", ""),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a version that is none"),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", "no trace"),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", "no span"),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", "capitals"),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", "too short"),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nX: y", "another header"),
        ("", "empty"),
    ],
)
def test_the_examples_of_the_specification(header: str, why: str) -> None:
    assert tracing.valid(header) == ("" if why else header)


@given(st.text(max_size=80))
def test_any_text_is_a_context_or_left_out(text: str) -> None:
    assert tracing.valid(text) in ("", text)
    with tracing.under(tracing.valid(text)):
        assert len(tracing.trace_id()) in (0, 32)
