"""The worker service's configuration."""

import msgspec


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str = "w1"
    """Instance id; also the node's name unless `node` is given."""
    node: str = ""
    """The machine that the processes run on, as the master's records name it."""
    url: str = ""
    """The bus: nats://host:port."""
    state_dir: str = "/var/lib/slackwater/worker"
    """jobs/<job>/rank<k>.{log,result.json,...}: survives a kill of this service."""
    slots: int = 64
    """Processes that may run at once."""
    stop_grace_s: float = 5.0
    """Between SIGTERM and SIGKILL."""
    keep_jobs: bool = False
    """Leave job processes running when this service is stopped (a kill -9 always does)."""
