"""Spans of a submission, as a collector of OpenTelemetry's gets them from every service."""

import asyncio
import gzip
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.waiting import soon

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = "b7ad6b7169203331"
SERVICES: Final = ("master-m1", "controller-c1", "worker-w1")


class Collector(ThreadingHTTPServer):
    """Takes spans over OTLP. It keeps (service, span) pairs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def named(self) -> dict[str, Any]:
        """Return the latest span of each `kind service name` of the trace."""
        kinds = {2: "answers", 3: "asks"}
        return {
            f"{service} {kinds[span.kind]} {span.name}": span
            for service, span in self.spans
            if span.trace_id.hex() == TRACE
        }


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            of = {each.key: each.value.string_value for each in one.resource.attributes}
            for scope in one.scope_spans:
                self.server.spans += [(of["service.name"], span) for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


async def run(*words: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slackwater.cli.main", *words,
        env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_a_submission_is_one_tree_of_spans_through_all_services(collector: Collector) -> None:
    """The trace is the submitter's own, which TRACEPARENT names."""
    export = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    options = ClusterOptions(
        controllers=1, aggregators=1, environment=dict.fromkeys(SERVICES, export)
    )
    async with EmbeddedCluster(options) as cluster, connect(cluster.url) as client:
        await run(
            "submit", "--id", "j1", "--url", cluster.url, "--", "sh", "-c", "echo $TRACEPARENT",
            **export, TRACEPARENT=f"00-{TRACE}-{PARENT}-01",
        )  # fmt: skip
        await client.job("j1")

        def launched() -> Any:
            return next((n for n in collector.named() if n.startswith("slackwater-worker")), "")

        reached = await soon(launched, "a span of the worker service")
        await run("wait", "j1", "--url", cluster.url)
        assert f"00-{TRACE}-" in await run("logs", "j1", "--url", cluster.url), "the program's own"
    spans = {span.span_id.hex(): (name, span) for name, span in collector.named().items()}

    def path(name: str) -> list[str]:
        above = collector.named()[name].parent_span_id.hex()
        return [*(path(spans[above][0]) if above in spans else [above]), name]

    first, *way = path(reached)
    assert first == PARENT
    assert way[:3] == [
        "slackwater asks slackwater submit",
        "slackwater asks master.submit",
        "slackwater-master answers master.submit",
    ]
    submitted = collector.named()["slackwater-master answers master.submit"]
    assert {each.key: each.value.string_value for each in submitted.attributes}["job"] == "j1"
    assert submitted.end_time_unix_nano >= submitted.start_time_unix_nano


async def test_a_collector_that_is_away_holds_nobody_up() -> None:
    """The command ends in time, and says what it did."""
    export = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    options = ClusterOptions(controllers=1, aggregators=1, environment={"master-m1": export})
    async with EmbeddedCluster(options) as cluster:
        said = await asyncio.wait_for(run("jobs", "--url", cluster.url, **export), 30.0)
    assert "no jobs" in said.lower()
