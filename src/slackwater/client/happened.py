"""Read the facts that the bus keeps, each with its sentence."""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected
from slackwater.common.domains.facts.sentences import ROUTINE, sentence
from slackwater.common.shell.client import Client
from slackwater.common.store.history import Kept
from slackwater.schemas import subjects
from slackwater.schemas.base import Message
from slackwater.schemas.facts import Fact


@dataclass(frozen=True, slots=True)
class Told:
    """One kept fact with its sentence. `fact`: None where it cannot be read, because a newer
    version wrote it."""

    kept: Kept
    fact: Message | None
    text: str

    @property
    def routine(self) -> bool:
        return self.kept.subject.rsplit(".", 1)[-1] in ROUTINE


async def recent(
    client: Client, job: str, count: int, since_s: float = 0.0, *, routine: bool = False
) -> list[Told]:
    """Return the newest so many facts that are kept, of `job` or all, the oldest first. Raises
    NothingKept where none are."""
    found: deque[Told] = deque(maxlen=count)
    async for each in told(client, job, since_s, 0, follow=False):
        if routine or not each.routine:
            found.append(each)
    return list(found)


def read(kept: Kept) -> Told:
    try:
        json = codec.looks_like_json(kept.payload)
        fact: Any = codec.decode(kept.payload, Fact, json)
    except DecodeRejected as error:
        return Told(kept, None, f"{kept.subject}: {error}")
    return Told(kept, fact, sentence(fact))


async def told(
    client: Client, job: str, since_s: float, after: int, *, follow: bool
) -> AsyncGenerator[Told, None]:
    kept = client.history.read(_patterns(job), since_s=since_s, after=after, follow=follow)
    async with aclosing(kept) as facts:
        async for each in facts:
            found = read(each)
            if not job or getattr(found.fact, "job", job) == job:
                yield found


def _patterns(job: str) -> Sequence[str]:
    """Match facts about the job. A migration's subject has an id of its own: the fact itself names
    the job."""
    return (subjects.events("job", job), subjects.events("migration")) if job else ()
