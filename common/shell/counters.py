"""Counts of a shell: plain numbers, read by `stats` and by the metrics when somebody asks.

No metric object and no lock is touched on the path of a request.
"""

from slackwater.common.base import limits
from slackwater.common.base.histogram import LATENCY_S, Histogram
from slackwater.common.bus.base import EndpointFigures


class Counters:
    """Since the process began. `own` are those of the service itself."""

    __slots__ = (
        "breaches_refused",
        "endpoints",
        "events",
        "facts",
        "fenced",
        "own",
        "publish_failed",
        "published",
        "records",
        "refused",
        "requests_failed",
        "requests_sent",
        "step_s",
        "step_s_max",
        "unanswered",
        "undecodable",
    )

    def __init__(self) -> None:
        self.records = 0
        self.endpoints: dict[str, EndpointFigures] = {}
        """Figures by verb."""
        self.refused = 0
        self.fenced = 0
        self.undecodable = 0
        self.breaches_refused = 0
        self.unanswered = 0
        self.facts = 0
        self.events: dict[tuple[str, str], int] = {}
        """Facts that were said, by noun and fact."""
        self.published = 0
        self.publish_failed = 0
        self.requests_sent = 0
        self.requests_failed = 0
        self.step_s = Histogram(LATENCY_S)
        self.step_s_max = 0.0
        self.own: dict[str, int] = {}

    def count(self, name: str, by: int = 1) -> None:
        if name not in self.own and len(self.own) >= limits.COUNTERS_MAX:
            raise ValueError(f"counter {name}: {limits.COUNTERS_MAX} names are in use already")
        self.own[name] = self.own.get(name, 0) + by

    def said(self, subject: str) -> None:
        """Count a fact or telemetry that went out under `subject`."""
        self.published += 1
        _, _, plane, noun, *_, fact = subject.split(".")
        if plane == "evt":
            self.events[noun, fact] = self.events.get((noun, fact), 0) + 1

    def all(self) -> dict[str, int]:
        """Every counter by its name in `stats`."""
        requests = {verb: figures.requests for verb, figures in self.endpoints.items()}
        shell = {
            "steps": self.step_s.count,
            "records": self.records,
            "requests": sum(requests.values()),
            "refused": self.refused,
            "fenced": self.fenced,
            "undecodable": self.undecodable,
            "breaches_refused": self.breaches_refused,
            "unanswered": self.unanswered,
            "facts": self.facts,
            "published": self.published,
            "publish_failed": self.publish_failed,
            "requests_sent": self.requests_sent,
            "requests_failed": self.requests_failed,
        }
        return shell | {f"requests_{verb}": n for verb, n in requests.items()} | self.own
