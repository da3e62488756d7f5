"""Metrics are read when they are scraped, logs are one JSON line an event."""

import asyncio
import contextlib
import json
import logging as standard
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from slackwater.common.base import limits
from slackwater.common.base import logging as logs
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell import metrics
from slackwater.common.shell.definition import Level


def exposed(samples: Callable[[], list[Level]] = list, port: int = -1) -> metrics.Exposition:
    collector = metrics.ServiceCollector("master", "main", samples)
    return metrics.Exposition(collector, "127.0.0.1", port)


def test_a_scrape_shows_the_numbers_of_that_moment() -> None:
    """The service's, and those of its process that every Prometheus client tells."""
    levels = [Level("fenced_total", {}, 41)]
    exposition = exposed(lambda: levels)
    try:
        levels[0] = Level("fenced_total", {}, 42)
        url = f"http://127.0.0.1:{exposition.port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
    finally:
        exposition.close()
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["slackwater_fenced_total"].value == 42
    assert found["slackwater_fenced_total"].labels == {"service": "master", "id": "main"}
    assert found["process_resident_memory_bytes"].value > 1e6
    assert {"process_cpu_seconds_total", "process_open_fds"} <= found.keys()


def test_connections_that_ask_nothing_take_few_threads_and_keep_no_scrape_out() -> None:
    """Some say nothing, some say half of a request, some never read their answer."""
    exposition = exposed()
    before, idle = threading.active_count(), []
    try:
        for i in range(10 * limits.SCRAPES_MAX):
            idle.append(socket.create_connection(("127.0.0.1", exposition.port), timeout=5))
            idle[-1].sendall((b"", b"GET /metrics HTT", b"GET /metrics HTTP/1.0\r\n\r\n")[i % 3])
            assert threading.active_count() <= before + limits.SCRAPES_MAX
        url = f"http://127.0.0.1:{exposition.port}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"slackwater_build_info" in answer.read()
        assert threading.active_count() <= before + limits.SCRAPES_MAX
    finally:
        for sock in idle:
            sock.close()
        exposition.close()


def test_a_connection_that_asks_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose bytes come now and then."""
    monkeypatch.setattr(limits, "SCRAPE_S", 0.2)
    exposition = exposed()
    try:
        with socket.create_connection(("127.0.0.1", exposition.port), timeout=5) as peer:
            peer.settimeout(0.05)
            with contextlib.suppress(ConnectionError):
                while True:
                    peer.sendall(b"x")
                    with contextlib.suppress(TimeoutError):
                        if not peer.recv(1):
                            break
    finally:
        exposition.close()


async def test_a_scrape_reads_a_core_in_the_thread_of_its_loop() -> None:
    def samples() -> Iterator[Level]:
        yield Level("tenant_used_cores", {"tenant": threading.current_thread().name}, 1.0)

    exposition = metrics.expose("master", "main", "::1", -1, samples)
    try:
        with pytest.raises(ConfigRejected, match=f"metrics_port {exposition.port} of ::1: "):
            metrics.expose("master", "main", "::1", exposition.port, samples)
        url = f"http://[::1]:{exposition.port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())
    finally:
        exposition.close()
    assert f'tenant="{threading.current_thread().name}"'.encode() in text


@pytest.fixture
def _clean() -> Any:
    root = standard.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.mark.usefixtures("_clean")
def test_ours_and_the_libraries_lines_look_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", service="toy", id="t1", pid=7)
    structlog.get_logger().info("ready", epoch=3)
    structlog.get_logger().debug("hidden")
    standard.getLogger("nats").warning("slow %s", "consumer")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["ready", "slow consumer", "failed"]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert all((line["service"], line["id"], line["pid"]) == ("toy", "t1", 7) for line in lines)
    assert lines[0]["epoch"] == 3
    assert "ValueError: broken" in lines[2]["exception"]


@pytest.mark.usefixtures("_clean")
def test_the_journal_is_told_priorities_and_nobody_else(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `journalctl -p warning` showed nothing, for every line had the same priority."""
    at = os.fstat(2)
    for stream, prefixes in ((f"{at.st_dev}:{at.st_ino}", ("<6>{", "<4>{")), ("1:2", ("{", "{"))):
        monkeypatch.setenv("JOURNAL_STREAM", stream)
        logs.configure("info", service="toy")
        structlog.get_logger().info("ready")
        standard.getLogger("nats").warning("slow %s", "consumer")
        lines = capfd.readouterr().err.splitlines()
        assert [line[: len(p)] for line, p in zip(lines, prefixes, strict=True)] == list(prefixes)
        assert [json.loads(line[line.index("{") :])["event"] for line in lines] == [
            "ready",
            "slow consumer",
        ]
