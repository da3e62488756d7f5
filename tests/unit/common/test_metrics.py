"""Metrics that Prometheus reads: every family follows its conventions, comes from somewhere, and is
in the operator's guide."""

import ast
import asyncio
import importlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as open_metrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families

from slackwater.common.base.clock import LiveClock
from slackwater.common.base.effects import Effect, Publish, Reply, Requested
from slackwater.common.base.histogram import Histogram
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.shell import metrics
from slackwater.common.shell.config import ServiceConfig, parse_config
from slackwater.common.shell.definition import Level, ServiceDefinition
from slackwater.common.shell.process import Process
from slackwater.common.shell.service import Shell
from slackwater.common.shell.world import World
from slackwater.common.store.history_memory import MemoryHistory
from slackwater.common.store.memory import MemoryStorage
from slackwater.common.store.objects import MemoryObjects
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok, Refused

ROOT = Path(__file__).resolve().parents[3]
SERVICES = sorted(path.parent.name for path in (ROOT / "services").glob("*/shell.py"))
UNITS = ("seconds", "bytes", "ratio", "cores", "pages", "info", "fragments")


def scraped(service: str, samples: Callable[[], list[Level]]) -> dict[str, Any]:
    """Its families, as Prometheus' own parser reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics.ServiceCollector(service, "x1", samples))
    list(read_open_metrics(open_metrics(registry).decode()))  # Newer scrapers ask for this.
    text = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in found, f"{family.name} is told twice"
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        found[family.name] = family
        seen = set()
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert (sample.name, labels) not in seen, sample
            seen.add((sample.name, labels))
            assert all(sample.labels.values()), f"{sample}: an empty label is none"
            assert {"service", "id"} <= sample.labels.keys()
            if family.type == "counter":
                assert sample.name.endswith("_total")
                assert sample.value >= 0
    return found


def world() -> World:
    clock = LiveClock()
    broker, storage = MemoryBroker(clock=clock), MemoryStorage(clock=clock)
    history = MemoryHistory(broker)
    return World(
        "x", clock, broker.connect("x"), storage.connect("x"), history, random.Random(1),
        MemoryObjects(clock),
    )  # fmt: skip


@pytest.mark.parametrize("service", SERVICES)
async def test_what_a_service_shows_is_read_by_prometheus(service: str, tmp_path: Path) -> None:
    """Before anything happened: each of its gauges is there already."""
    config_module = importlib.import_module(f"slackwater.services.{service}.config")
    (kind,) = [
        value
        for value in vars(config_module).values()
        if isinstance(value, type)
        and issubclass(value, ServiceConfig)
        and value.__module__ == config_module.__name__
    ]
    config = parse_config({"id": "x1", "state_dir": str(tmp_path)}, kind, "test")
    shell = importlib.import_module(f"slackwater.services.{service}.shell")
    definition: ServiceDefinition = shell.definition(config, world())
    found = scraped(service, lambda: list(definition.service_gauges()))
    prefix = {"slabd": "lender"}.get(service, service)
    own = {f"slackwater_{name}" for name, family in metrics.FAMILIES.items()
           if name.startswith(f"{prefix}_") and family.kind != "counter"}  # fmt: skip
    assert own <= found.keys()


class _Core:
    """Answers, and tells it."""

    def step(self, event: Any, now_s: float) -> list[Effect]:
        if not isinstance(event, Requested):
            return []
        fact = Publish(subjects.event("job", "j1", "completed"), Ok())
        answer = Refused(reason="none", code=404) if event.message.epoch else Ok()
        return [fact, Reply(event.token, answer)]


async def test_a_shell_counts_requests_refusals_facts_and_time() -> None:
    here, stop = world(), asyncio.Event()
    shell = Shell(
        ServiceDefinition(service="toy", id="x1", core=_Core(), endpoints={"act": Ok}),
        here, stop, Process(),
    )  # fmt: skip
    running = asyncio.create_task(shell.run())
    client = here.bus._broker.connect("client")  # type: ignore[attr-defined]
    subject = subjects.command("toy", "x1", "act")
    async with asyncio.timeout(5.0):
        while not here.bus._workers:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    for payload in (b'{"t":"ok"}', b'{"t":"ok","epoch":1}', b"?"):
        await client.request(subject, payload, timeout_s=5.0)
    found = scraped("toy", lambda: list(shell.samples()))
    stop.set()
    assert await running == 0

    def value(name: str, **labels: str) -> float:
        (sample,) = [
            sample
            for sample in found[name.removesuffix("_total").removesuffix("_count")].samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return float(sample.value)

    assert value("slackwater_requests_total", endpoint="act") == 3
    assert value("slackwater_requests_refused_total", endpoint="act", code="404") == 1
    assert value("slackwater_requests_refused_total", endpoint="act", code="400") == 1
    assert value("slackwater_request_duration_seconds_count", endpoint="act") == 3
    assert value("slackwater_step_duration_seconds_count") == 3  # The first one: Recovered.
    assert value("slackwater_events_total", noun="job", fact="completed") == 2
    assert value("slackwater_undecodable_total") == 1
    assert value("slackwater_bus_connected") == 1
    info = found["slackwater_build_info"].samples[0].labels
    assert re.fullmatch(r"\d+\.\d+\.\d+", info["python"])


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.add(value)
    level = Level("step_duration_seconds", {}, histogram)
    (family,) = [
        family for family in scraped("toy", lambda: [level]).values() if family.type == "histogram"
    ]
    buckets = [(each.labels["le"], each.value) for each in family.samples if "le" in each.labels]
    assert buckets == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    rest = {each.name: each.value for each in family.samples if "le" not in each.labels}
    assert rest["slackwater_step_duration_seconds_count"] == 4.0
    assert rest["slackwater_step_duration_seconds_sum"] == pytest.approx(7.65)


def test_names_follow_the_conventions() -> None:
    for name, family in metrics.FAMILIES.items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name), name
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert not re.search(r"_(s|ms|us|ns|kb|mb|gb|percent|count|sum|bucket)(_|$)", name), name
        assert not {"service", "id", "le", "job"} & set(family.labels), name
        if family.kind == "histogram":
            assert name.endswith(UNITS), name


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("common", "services", "src/slackwater/memory"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path, ast.parse(path.read_text())


def test_every_own_counter_has_a_family() -> None:
    """Every name that is given to `count`, directly or by the effect `Count`, has a family."""
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Count":
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                assert all(any(name.startswith(text) for name in metrics.OWN) for text in texts), (
                    path,
                    texts,
                )
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("count", "_count") or not node.args:
                continue
            owner = ast.unparse(node.func.value)
            names = [each.value for each in ast.walk(node.args[0])
                     if isinstance(each, ast.Constant)]  # fmt: skip
            if owner.endswith(("port", "state", "counters")) and len(node.args) <= 2:
                assert all(name in metrics.OWN for name in names), (path, names)
    assert {family for family, _ in metrics.OWN.values()} <= metrics.FAMILIES.keys()


def test_every_family_comes_from_somewhere() -> None:
    shown = {family for family, _ in metrics.OWN.values()}
    texts = {
        each.value
        for path, tree in _sources()
        for each in ast.walk(tree)
        if isinstance(each, ast.Constant)
        and isinstance(each.value, str)
        and (path != ROOT / "common/shell/metrics.py" or each.value not in metrics.FAMILIES)
    }
    shells = {*metrics._SHELLS.values(), *metrics._GAUGES.values()}
    for name in metrics.FAMILIES.keys() - shown - shells:
        tail = name.partition("_")[2]
        in_metrics = f'Level("{name}"' in (ROOT / "common/shell/metrics.py").read_text()
        device = name.startswith("device_") and tail.removesuffix("_total") in texts
        assert name in texts or tail in texts or in_metrics or device, name


def test_the_guide_lists_every_family() -> None:
    text = (ROOT / "docs/guide/operator.md").read_text()
    section = text.split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `slackwater_(\w+)(?:\{(.*?)\})?` \| (\w+) \| (.*) \|$", section, re.M)
    told = {
        name: metrics.Family(kind, meaning, tuple(filter(None, labels.split(", "))))  # type: ignore[arg-type]
        for name, labels, kind, meaning in rows
    }
    assert told == dict(metrics.FAMILIES)
