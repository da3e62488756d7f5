"""`slackwater submit --array`: many jobs of one kind, each with its own number.

A job of the array has the base's id and its number, finds the number as ARRAY_INDEX in its
environment, and has it in place of `{index}` in its command. `0-99%4` lets four run at a time: each
job comes after the one four before it, however that ended.
"""

import re
from typing import Final, NamedTuple

import msgspec

from slackwater.client import AsyncClient
from slackwater.client.packs import Sent, store
from slackwater.console.names import said
from slackwater.console.outcome import FAILED, Usage, err, noted, out, print_json
from slackwater.schemas.base import ID_PATTERN
from slackwater.schemas.jobs import JobSpec

JOBS_MAX: Final = 1_000
INDEX: Final = "{index}"
_PART: Final = "[0-9]{1,6}(?:-[0-9]{1,6})?"
_WORDS: Final = "write it as 0-9, as 1,3,5 or as 0-99%4 (four at a time)"


class Array(NamedTuple):
    """Numbers, ascending; `at_once`: how many may run at a time, 0: all."""

    indices: tuple[int, ...]
    at_once: int = 0


def parsed(text: str) -> Array:
    """Raises Usage."""
    found = re.fullmatch(rf"({_PART}(?:,{_PART})*)(?:%([0-9]{{1,4}}))?", text)
    if found is None:
        raise Usage(f"--array {text!r}: {_WORDS}")
    indices: set[int] = set()
    for part in found[1].split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if last < first or last - first >= JOBS_MAX:
            raise Usage(
                f"--array {text!r}: {part} has not from 1 to {JOBS_MAX:,} numbers; {_WORDS}"
            )
        indices.update(range(first, last + 1))
    if len(indices) > JOBS_MAX:
        raise Usage(f"--array {text!r}: an array has at most {JOBS_MAX:,} jobs")
    at_once = int(found[2] or 0)
    if found[2] is not None and at_once < 1:
        raise Usage(f"--array {text!r}: at least one runs at a time; {_WORDS}")
    return Array(tuple(sorted(indices)), at_once)


def jobs(base: JobSpec, array: Array) -> list[JobSpec]:
    """Return the array's jobs. Raises Usage."""
    if array.at_once and base.after:
        raise Usage("--array with % beside --after: each job comes after another one of the array")
    found: list[JobSpec] = []
    for place, index in enumerate(array.indices):
        id = f"{base.id}-{index}"
        if re.fullmatch(ID_PATTERN, id) is None:
            raise Usage(f"--array: {id!r} is too long for a job's id; give a shorter --id")
        changes: dict[str, object] = {
            "id": id,
            "program": tuple(word.replace(INDEX, str(index)) for word in base.program),
            "env": {
                **base.env, "ARRAY_INDEX": str(index), "ARRAY_COUNT": str(len(array.indices)),
                "ARRAY_ID": base.id,
            },
        }  # fmt: skip
        if array.at_once and place >= array.at_once:
            changes |= {"after": (found[place - array.at_once].id,), "after_any": True}
        found.append(msgspec.structs.replace(base, **changes))
    return found


async def submit(
    client: AsyncClient, specs: list[JobSpec], sent: Sent, wait: bool, json: bool
) -> int:
    """Submit all of them; with `wait` until all have ended. Return the exit code: 1 where one did
    not complete."""
    await store(client, sent, noted)
    for spec in specs:
        known = await client.submit(spec)
        if known is not None:
            err.print(said(spec, known), markup=False)
    if not wait:
        _say(specs, json)
        return 0
    noted(_stored(specs))
    ended = await client.wait(*(spec.id for spec in specs))
    bad = [each for each in ended if each.state != "completed"]
    if json:
        print_json(ended)
    else:
        out.print(f"{len(ended) - len(bad):,} of {len(ended):,} jobs completed", highlight=False)
    for each in bad:
        err.print(f"job {each.job} {each.state}: {each.reason}", markup=False)
    return FAILED if bad else 0


def _say(specs: list[JobSpec], json: bool) -> None:
    if json:
        print_json(specs)
    else:
        out.print(_stored(specs), markup=False, highlight=False, soft_wrap=True)


def _stored(specs: list[JobSpec]) -> str:
    return f"{len(specs):,} jobs are stored: {specs[0].id} to {specs[-1].id}"
