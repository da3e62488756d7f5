"""NATS micro (ADR-32), the answering side: what `nats micro ls | info | stats | ping` shows.

The client library brings an implementation, but its endpoints work on one request at a time and
its figures end where a handler hands its request over. Ours come from the workers themselves.
Every service answers on `$SRV.PING|INFO|STATS[.<name>[.<id>]]`, always in JSON.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from slackwater.common.bus.base import ServiceInfo
from slackwater.common.bus.dispatch import EndpointWorker

QUEUE_GROUP: Final = "q"
"""The convention's default: one of several instances answers a request."""
ERROR_HEADER: Final = "Nats-Service-Error"
ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"
VERBS: Final = ("PING", "INFO", "STATS")


class MicroService:
    """One instance of a service, and its answers to the three verbs."""

    def __init__(
        self, info: ServiceInfo, instance: str, workers: Sequence[EndpointWorker], now_s: float
    ) -> None:
        self._info = info
        self._instance = instance
        self._workers = list(workers)
        self._started = datetime.fromtimestamp(now_s, UTC).isoformat().replace("+00:00", "Z")

    def subjects(self, verb: str) -> tuple[str, str, str]:
        every = f"$SRV.{verb}"
        return every, f"{every}.{self._info.name}", f"{every}.{self._info.name}.{self._instance}"

    def answer(self, verb: str) -> bytes:
        document: dict[str, Any] = {
            "type": f"io.nats.micro.v1.{verb.lower()}_response",
            "name": self._info.name,
            "id": self._instance,
            "version": self._info.version,
            "metadata": dict(self._info.metadata),
        }
        if verb == "INFO":
            document["description"] = self._info.description
            document["endpoints"] = [_endpoint(worker) for worker in self._workers]
        elif verb == "STATS":
            document["started"] = self._started
            document["endpoints"] = [_stats(worker) for worker in self._workers]
        return msgspec.json.encode(document)


def _endpoint(worker: EndpointWorker) -> dict[str, Any]:
    return {
        "name": worker.endpoint.name,
        "subject": worker.endpoint.subject,
        "queue_group": QUEUE_GROUP,
        "metadata": dict(worker.endpoint.metadata),
    }


def _stats(worker: EndpointWorker) -> dict[str, Any]:
    figures = worker.figures
    busy_ns = round(figures.took_s.sum * 1e9)
    return {
        "name": worker.endpoint.name,
        "subject": worker.endpoint.subject,
        "queue_group": QUEUE_GROUP,
        "num_requests": figures.requests,
        "num_errors": figures.errors,
        "last_error": figures.last_error,
        "processing_time": busy_ns,
        "average_processing_time": busy_ns // max(1, figures.requests),
        "data": {"concurrency": worker.endpoint.concurrency},
    }
