"""Metrics are read when they are scraped, logs are one JSON line an event."""

import asyncio
import contextlib
import json
import logging as standard
import os
import random
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import eventually

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


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_requests_of_any_bytes_end_alone_and_leave_nothing(count: int) -> None:
    """Bytes at random, requests cut off, heads without an end, answers that nobody reads. A scrape
    between them is served, and descriptors and threads are as before."""
    rng, exposition = random.Random(count), exposed()
    port, process = exposition.port, psutil.Process()

    def hostile() -> None:
        whole = rng.choice((b"GET", b"PUT", b"\x00", b"get" * 30_000)) + rng.choice(
            (b" /metrics HTTP/1.1\r\n\r\n", b" / HTTP/9.9\r\nA: " + b"b" * 70_000, b" \r\n" * 500)
        )
        said = rng.randbytes(rng.randrange(1, 4096)) if rng.random() < 0.3 else whole
        sock = socket.create_connection(("127.0.0.1", port), timeout=5)
        with sock, contextlib.suppress(OSError):  # It hangs up in the middle of nonsense.
            sock.sendall(said[: rng.randrange(1, len(said) + 1)])
            if rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                sock.recv(rng.randrange(1, 65_536))

    def scrape() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return bytes(answer.read())

    try:
        scrape()
        files, threads = process.num_fds(), threading.active_count()
        for number in range(count):
            hostile()
            if number % 50 == 0:
                assert b"process_open_fds" in scrape()
        eventually(lambda: threading.active_count() <= threads, "threads end")
        assert process.num_fds() <= files + 1
    finally:
        exposition.close()
