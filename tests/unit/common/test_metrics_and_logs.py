"""Metrics are read when they are scraped, logs are one JSON line an event."""

import asyncio
import contextlib
import json
import logging as standard
import socket
import threading
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from slackwater.common import limits, metrics
from slackwater.common import logging as logs
from slackwater.common.shell import main
from slackwater.common.shell.counters import Counters
from slackwater.common.shell.definition import Level


def test_a_scrape_shows_the_counters_of_that_moment() -> None:
    counters = Counters()
    collector = metrics.ShellCollector(
        "master", "main", counters.all, lambda: {"timers": 3.0, "epoch": 2.0}
    )
    exposition = metrics.Exposition(collector, -1)
    try:
        counters.steps = 41
        counters.steps += 1
        counters.count("pushes", 5)
        url = f"http://127.0.0.1:{exposition.port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
    finally:
        exposition.close()
    found = {
        (sample.name, sample.labels.get("name", "")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["slackwater_steps_total", ""].value == 42
    assert found["slackwater_own_total", "pushes"].value == 5
    assert found["slackwater_timers", ""].value == 3
    assert found["slackwater_steps_total", ""].labels == {"service": "master", "id": "main"}


def test_connections_that_ask_nothing_take_few_threads_and_keep_no_scrape_out() -> None:
    """Some say nothing, some say half of a request, some never read their answer."""
    collector = metrics.ShellCollector("master", "main", Counters().all, dict)
    exposition = metrics.Exposition(collector, -1)
    before, idle = threading.active_count(), []
    try:
        for i in range(10 * limits.SCRAPES_MAX):
            idle.append(socket.create_connection(("127.0.0.1", exposition.port), timeout=5))
            idle[-1].sendall((b"", b"GET /metrics HTT", b"GET /metrics HTTP/1.0\r\n\r\n")[i % 3])
            assert threading.active_count() <= before + limits.SCRAPES_MAX
        url = f"http://127.0.0.1:{exposition.port}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"slackwater_steps_total" in answer.read()
        assert threading.active_count() <= before + limits.SCRAPES_MAX
    finally:
        for sock in idle:
            sock.close()
        exposition.close()


def test_a_connection_that_asks_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose bytes come now and then."""
    monkeypatch.setattr(limits, "SCRAPE_S", 0.2)
    collector = metrics.ShellCollector("master", "main", dict, dict)
    exposition = metrics.Exposition(collector, -1)
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


def test_a_services_own_levels_are_shown_with_their_labels_as_they_are_then() -> None:
    levels = [Level("tenant_used_cores", {"tenant": "a"}, 1.5)]
    collector = metrics.ShellCollector("master", "main", dict, dict, lambda: levels)
    levels.append(Level("tenant_used_cores", {"tenant": ""}, 0.5))
    families = {each.name: each for each in collector.collect()}
    family = families["slackwater_tenant_used_cores"]
    assert family.documentation == metrics.LEVELS["tenant_used_cores"]
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"service": "master", "id": "main", "tenant": "a"}, 1.5),
        ({"service": "master", "id": "main", "tenant": ""}, 0.5),
    ]


async def test_a_scrape_reads_a_core_in_the_thread_of_its_loop() -> None:
    def levels() -> list[Level]:
        return [Level("tenant_used_cores", {"tenant": threading.current_thread().name}, 1.0)]

    shell: Any = SimpleNamespace(counters=Counters(), gauges=dict, levels=levels)
    exposition = main._expose("master", "main", -1, shell)
    try:
        url = f"http://127.0.0.1:{exposition.port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())
    finally:
        exposition.close()
    assert f'tenant="{threading.current_thread().name}"'.encode() in text


def test_every_counter_and_gauge_is_declared() -> None:
    shown = set(Counters().all())
    assert shown == set(metrics.COUNTERS)


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
