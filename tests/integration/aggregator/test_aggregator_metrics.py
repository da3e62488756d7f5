"""Metrics that Prometheus reads of aggregators that serve a job, and answers to operators'
tools."""

import asyncio
import urllib.request
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.ports import free_port

from slackwater.schemas import subjects

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
ELEMENTS = 1_000_003


def scraped(port: int) -> dict[str, float]:
    """Every sample that has no labels but its service's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.keys() <= {"service", "id"}
    }


async def test_metrics_tell_what_an_aggregator_did(
    lab: Any, training: Any, check_result: Any
) -> None:
    """Two real aggregators, one job, one bucket that moves: bytes, folds, slots, memory, moves."""
    ports = {"a1": free_port()}
    await lab.aggregators("a1", metrics_port=ports["a1"])
    ports["a2"] = free_port()
    await lab.aggregators("a2", metrics_port=ports["a2"])
    run = training(sizes={"w": ELEMENTS})
    run.start()
    await run.until(3)
    iterations = await run.finish(more=2)
    first = await asyncio.to_thread(scraped, ports["a1"])
    await lab.director.move(lab.director.jobs["j1"], 0, "a2")
    await check_result(run, iterations)
    moved = 4 * ELEMENTS * run.workers * iterations
    assert first["slackwater_aggregator_received_bytes_total"] == moved
    assert first["slackwater_aggregator_sent_bytes_total"] == moved
    assert first["slackwater_aggregator_folds_total"] == iterations
    assert first["slackwater_aggregator_fold_cpu_seconds_total"] > 0
    assert first["slackwater_aggregator_slot_busy_seconds_total"] > 0
    assert first["slackwater_aggregator_buckets"] == first["slackwater_aggregator_jobs"] == 1
    assert first["slackwater_aggregator_held_bytes"] > 4 * ELEMENTS
    assert first["process_open_fds"] > 0
    after = await asyncio.to_thread(scraped, ports["a1"])
    assert after["slackwater_aggregator_migrated_buckets_total"] == 1
    assert after["slackwater_aggregator_migrated_bytes_total"] > 4 * ELEMENTS
    assert after["slackwater_aggregator_buckets"] == 0
    raw = await lab.bus.request("$SRV.STATS.aggregator", b"", timeout_s=5.0)
    endpoints = {each["name"]: each for each in msgspec.json.decode(raw)["endpoints"]}
    asked = subjects.command("aggregator", "a1", "held")
    assert endpoints["held"]["num_requests"] > 0
    assert endpoints["held"]["subject"].rpartition(".")[2] == asked.rpartition(".")[2]
    assert endpoints["held"]["processing_time"] > 0
