"""The worker service's own samples, made when somebody scrapes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from slackwater.common.shell.definition import Level
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.core import WorkerCore
from slackwater.services.worker.gpus import Inventory
from slackwater.services.worker.permit_server import PermitServer
from slackwater.services.worker.permits import Permits
from slackwater.services.worker.processes import log_bytes
from slackwater.services.worker.warm import Warm


class Holds(Protocol):
    """The service's shell."""

    warm: Warm
    permits: PermitServer


def service_gauges(
    config: WorkerConfig, core: WorkerCore, inventory: Inventory, processes: "Holds"
) -> Iterator[Level]:
    counts = core.counts()
    types = Counter(gpu.type for gpu in inventory.gpus) or {config.gpu_type: 0}
    yield Level("worker_slots", {}, config.slots)
    for kind, number in types.items():
        yield Level("worker_gpus", {"type": kind}, number)
    yield Level("worker_gpus_faulty", {}, sum(bool(gpu.fault) for gpu in inventory.gpus))
    yield Level("worker_ranks", {"state": "running"}, counts["running"])
    yield Level("worker_ranks", {"state": "exited"}, counts.total() - counts["running"])
    yield Level("worker_warm", {}, int(processes.warm.ready))
    yield Level("worker_log_bytes", {}, log_bytes(Path(config.state_dir)))
    yield from _of_permits(processes.permits.permits)


def _of_permits(permits: Permits) -> Iterator[Level]:
    for kind in permits.kinds:
        counts = permits.counts(kind)
        for state in ("waits", "primary", "secondary", "late"):
            labels = {"kind": kind, "state": state}
            yield Level("worker_permits", labels, counts[state])
