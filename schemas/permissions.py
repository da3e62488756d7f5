"""Subjects that each user of the bus may publish and listen to: services, operators, tenants.

A bus with accounts lets them do exactly that (common/bus/users.py). A service may also publish one
answer to the inbox that a request names. Each user alone listens to the inboxes below its prefix.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, get_args

from slackwater.schemas import subjects
from slackwater.schemas.facts import FACTS
from slackwater.schemas.relay import ASKED, TOLD

Service = Literal[
    "master", "controller", "aggregator", "profiler", "worker", "slabd", "device", "bus"
]
SERVICES: Final[tuple[Service, ...]] = get_args(Service)
OWN_VERBS: Final = ("health", "info", "stats", "drain")
"""Verbs that every service answers."""
SERVED: Final[Mapping[Service, tuple[str, ...]]] = {
    "master": (
        "submit", "cancel", "rerun", "delete", "pause", "resume", "scale", "size", "join", "meet",
        "mark", "use", "get", "list", "register", "finish", "worker-exited", "missing", "allocate",
        "deallocate", "adopt", "aggregators", "tenants", "usage", "policy", "set-policy", "nodes",
    ),
    "controller": (
        "place", "release", "locate", "checkpoint", "mark", "empty", "restore", "lost",
    ),
    "aggregator": ("host", "drop", "migrate", "held", "turns", "copy", "write"),
    "profiler": (),
    "worker": ("prepare", "start", "stop", "log", "look", "type"),
    "slabd": ("slabs", "evict", "lending"),
    "device": ("map",),
    "bus": (),
}  # fmt: skip
"""The verbs of each service's own."""
OF_TENANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "master": (
        "submit", "cancel", "rerun", "delete", "pause", "resume", "scale", "get", "list", "usage",
        "policy", "nodes",
    ),
    "worker": ("log", "type"),
}  # fmt: skip
"""The verbs that a user of one tenant may ask for, about the tenant's own jobs."""
_RELAYED: Final[dict[str, tuple[str, ...]]] = {
    service: tuple(verb for one, verb in ASKED if one == service) for service, _ in ASKED
}
ASKS: Final[Mapping[Service, Mapping[str, tuple[str, ...]]]] = {
    "master": {
        "controller": ("place", "release"),
        "aggregator": ("held", "drop"),
        "worker": ("prepare", "start", "stop", "log", "look"),
    },
    "controller": {
        "aggregator": ("host", "drop", "migrate", "held", "turns", "copy", "write"),
        "master": ("allocate", "deallocate", "adopt", "aggregators"),
    },
    "aggregator": {},
    "profiler": {},
    "worker": {**_RELAYED, "master": ("worker-exited", *_RELAYED["master"])},
    "slabd": {},
    "device": {"device": ("map",)},
    "bus": {},
}
"""Verbs of other services that each asks for; a worker service passes on its jobs' requests."""
_CONTROLLERS_JOB: Final = (
    "located", "measured", "assigned", "steady", "rehosted", "reverted", "expanded", "protected",
    "interfered", "corrected", "unprofiled", "checkpointed", "save-interval", "checkpoint-failed",
    "rolled-back",
)  # fmt: skip
_AGGREGATORS_JOB: Final = ("optimizer-state-recovered", "optimizer-state-lost", "restored")
_PROFILERS_JOB: Final = ("profiled", "window")
_OTHERS_JOB: Final = {*_AGGREGATORS_JOB, *_PROFILERS_JOB, *_CONTROLLERS_JOB} - {"rolled-back"}
SAYS: Final[Mapping[Service, Mapping[str, tuple[str, ...]]]] = {
    "master": {
        "job": tuple(fact for fact in FACTS["job"] if fact not in _OTHERS_JOB),
        "aggregator": ("allocated", "released", "lost", "returned", "adopted"),
        "policy": tuple(FACTS["policy"]),
    },
    "controller": {
        "job": _CONTROLLERS_JOB,
        "aggregator": (
            "congested", "cleared", "draining", "late", "drained", "restored", "vanished",
        ),
        "migration": ("started", "finished", "cancelled"),
    },
    "aggregator": {"job": _AGGREGATORS_JOB, "migration": ("copied", "worker-done")},
    "profiler": {"job": _PROFILERS_JOB},
    "worker": {},
    "slabd": {"slab": tuple(FACTS["slab"])},
    "device": {"device": tuple(FACTS["device"])},
    "bus": {},
}  # fmt: skip
"""Facts that each publishes, by noun."""
MEASURES: Final[Mapping[Service, tuple[str, ...]]] = {
    "controller": ("report",),
    "aggregator": ("tasks",),
    "profiler": ("host",),
}
"""Telemetry about itself that each publishes beside its heartbeat."""
WITNESSED: Final = ("master", "controller")
"""Services that tell the marks of their buckets, and ask for them when they begin."""
REMEMBERS: Final = ("master", "controller", "profiler")
"""Services that remember these marks."""
OF_JOBS: Final = (*TOLD, "traffic")
"""Telemetry about jobs, which worker services publish: their programs' and their own."""
HEARS: Final[Mapping[Service, tuple[str, ...]]] = {
    "master": (
        subjects.telemetries("aggregator", what="heartbeat"),
        subjects.telemetries("worker", what="heartbeat"),
        subjects.telemetries("controller", what="report"),
        *(subjects.telemetries("job", what=what) for what in OF_JOBS),
        subjects.events("job", fact="profiled"),
        subjects.events("job", fact="optimizer-state-lost"),
    ),
    "controller": (
        subjects.telemetries("aggregator", what="heartbeat"),
        subjects.telemetries("aggregator", what="restarts"),
        subjects.events("aggregator", fact="released"),
        *(subjects.events("job", fact=fact) for fact in _PROFILERS_JOB),
        *(subjects.events("migration", fact=fact) for fact in ("copied", "worker-done")),
    ),
    "aggregator": (),
    "profiler": (
        subjects.telemetries("job", what="iterations"),
        subjects.telemetries("aggregator", what="tasks"),
        *(subjects.events("job", fact=fact) for fact in ("completed", "failed", "cancelled")),
    ),
    "worker": (),
    "slabd": (),
    "device": (subjects.telemetries("slabd", what="heartbeat"),),
    "bus": (),
}
"""Facts and telemetry that each listens to."""
_NAMESAKES: Final = ("aggregator", "slabd")
"""Services that end when another of their id begins: they listen to their own heartbeats."""
CODE_STREAM: Final = "OBJ_code"
FACTS_STREAM: Final = "facts"


class Grants(NamedTuple):
    """Subjects, as patterns. Inboxes are not among them: each user has its own."""

    publish: tuple[str, ...]
    listen: tuple[str, ...]


def buckets_of(service: Service, id: str) -> tuple[str, ...]:
    """Name the buckets whose only writer this instance is."""
    named = {
        "master": ("jobs", "nodes", "policies", "usage", "scaling", "ended"),
        "controller": (f"placements_{id}", f"drains_{id}"),
        "slabd": (f"lender_{id}",),
        "device": (f"device_{id}",),
    }
    return named.get(service, ())


def of_service(service: Service, id: str) -> Grants:
    """Return what an instance may do. All masters serve under one id; `bus` watches the disk of a
    bus server, and only says what it sees."""
    if service == "bus":
        return Grants((subjects.telemetry(service, id, "state"),), ())
    served = subjects.MASTER if service == "master" else id
    return Grants(tuple(_says(service, served)), tuple(_hears(service, served)))


def of_operator() -> Grants:
    """Return what operators may do: ask everything of everybody, hear all, read and mend what is
    stored; run programs by hand. Nothing that services say."""
    return Grants(
        publish=(
            f"{subjects.PREFIX}.cmd.>",
            *(subjects.telemetries("job", what=what) for what in TOLD),
            subjects.telemetries("aggregator", what="restarts"),
            "$SRV.>", "$JS.API.>", "$JS.ACK.>", "$JS.FC.>", "$JS.SNAPSHOT.>", "$KV.>", "$O.>",
            "$SYS.REQ.USER.INFO",
        ),
        listen=(subjects.facts(), f"{subjects.PREFIX}.tel.>", "$KV.>", "_INBOX.>"),
    )  # fmt: skip


def of_owner() -> Grants:
    """Return what the account may do that started a cluster with `slackwater up`: what operators
    may, and serve devices of remote memory."""
    operator, device = of_operator(), of_service("device", "*")
    return Grants(
        operator.publish + tuple(each for each in device.publish if "_*" not in each),
        operator.listen + device.listen,
    )


def of_tenant(tenant: str) -> Grants:
    """Return what a user may do who submits and follows the jobs of one tenant."""
    verbs = [
        f"{subjects.PREFIX}.own.{tenant}.{service}.*.{verb}"
        for service, verbs in OF_TENANTS.items()
        for verb in verbs
    ]
    return Grants(
        publish=(*verbs, *_reads(FACTS_STREAM), *_writes_objects(), "$SYS.REQ.USER.INFO"),
        listen=(subjects.events("job"), subjects.telemetries("worker", what="heartbeat")),
    )


def _says(service: Service, id: str) -> Iterator[str]:
    for what in ("heartbeat", *MEASURES.get(service, ())):
        yield f"{subjects.PREFIX}.tel.{service}.{id}.{what}"
    told = ("witness", "recovering") if service in WITNESSED else ()
    for what in (*told, *(("remembered",) if service in REMEMBERS else ())):
        yield f"{subjects.PREFIX}.tel.{service}.{id}.{what}"
    for noun, facts in SAYS[service].items():
        about = id if noun in ("device",) else "*"
        for fact in facts:
            yield f"{subjects.PREFIX}.evt.{noun}.{about}.{fact}"
    for other, verbs in ASKS[service].items():
        at = subjects.MASTER if other == "master" else "*"
        for verb in verbs:
            yield f"{subjects.PREFIX}.cmd.{other}.{at}.{verb}"
    if service == "worker":
        for what in OF_JOBS:
            yield f"{subjects.PREFIX}.tel.job.*.{what}"
        yield from _reads_objects()
    for bucket in buckets_of(service, id):
        yield f"$KV.{bucket}.>"
        yield from _makes(f"KV_{bucket}")
        yield f"$KV.damaged.{bucket}.>"
    key = f"{service}_{id}"
    shared = ["breaches", "damaged"]
    if buckets_of(service, id):
        shared.append("accepted")
    else:
        shared.append("instances")
        yield f"$KV.instances.{key}"
    if service == "master":
        yield from _makes(FACTS_STREAM)
        yield f"$JS.API.STREAM.DELETE.{FACTS_STREAM}"
        yield f"{subjects.PREFIX}.facts.probe"
        yield "$KV.leases.master"
        shared.append("leases")
    yield f"$KV.breaches.{key}"
    for bucket in shared:
        yield f"$KV.{bucket}._epoch"  # A write that cannot succeed asks for the last sequence.
        yield from _makes(f"KV_{bucket}")


def _hears(service: Service, id: str) -> Iterator[str]:
    for verb in (*SERVED[service], *OWN_VERBS):
        yield f"{subjects.PREFIX}.cmd.{service}.{id}.{verb}"
    for verb in OF_TENANTS.get(service, ()):
        yield f"{subjects.PREFIX}.own.*.{service}.{id}.{verb}"
    yield from HEARS[service]
    heard = ("witness", "recovering") if service in REMEMBERS else ()
    for what in (*heard, *(("remembered",) if service in WITNESSED else ())):
        yield subjects.telemetries(what=what)
    if buckets_of(service, id):
        yield subjects.telemetries("bus", what="state")
    if service in _NAMESAKES:
        yield f"{subjects.PREFIX}.tel.{service}.{id}.heartbeat"
    for verb in ("PING", "INFO", "STATS"):
        yield f"$SRV.{verb}"
        yield f"$SRV.{verb}.{service}"
        yield f"$SRV.{verb}.{service}.*"


def _makes(stream: str) -> Iterator[str]:
    yield f"$JS.API.STREAM.CREATE.{stream}"
    yield f"$JS.API.STREAM.UPDATE.{stream}"
    yield from _reads(stream)


def _reads(stream: str) -> Iterator[str]:
    yield f"$JS.API.STREAM.INFO.{stream}"
    yield f"$JS.API.STREAM.MSG.GET.{stream}"
    yield f"$JS.API.CONSUMER.CREATE.{stream}"
    yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
    yield f"$JS.API.CONSUMER.DELETE.{stream}.*"


def _reads_objects() -> Iterator[str]:
    """Fetch packs of code, and remove those that nobody needs."""
    yield from _writes_objects()
    yield "$JS.API.STREAM.NAMES"  # The client library looks a stream up by its subject.
    yield f"$JS.API.STREAM.PURGE.{CODE_STREAM}"


def _writes_objects() -> Iterator[str]:
    yield from _makes(CODE_STREAM)
    yield f"$JS.API.CONSUMER.CREATE.{CODE_STREAM}.>"
    yield f"$JS.API.DIRECT.GET.{CODE_STREAM}"
    yield f"$JS.API.DIRECT.GET.{CODE_STREAM}.>"
    yield "$O.code.C.*"
    yield "$O.code.M.*"
