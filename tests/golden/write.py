"""Write this version's messages and stored records, which later versions must be able to read.

    python -m tests.golden.write        once, when a version is cut

Three examples of every type, drawn from the type's own bounds by a seed, as they go over the bus
and into a bucket.
"""

import json
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from tests.golden import kinds
from tests.golden.kinds import FOLDER

from slackwater.common.base import codec
from slackwater.schemas.base import Message, Record

EXAMPLES = 3
EPOCH = 7


def examples(kind: type[Any], version: str) -> list[Any]:
    from tests.fuzz.messages import made

    return [made(kind, Random(f"{version}/{kind.__name__}/{n}")) for n in range(EXAMPLES)]


def write(version: str) -> Path:
    path = FOLDER / f"{version}.json"
    messages = {
        name: [codec.encode(each).hex() for each in examples(kind, version)]
        for name, kind in kinds.of(Message).items()
    }
    records = {
        name: [codec.encode_record(each, EPOCH).hex() for each in examples(kind, version)]
        for name, kind in kinds.of(Record).items()
        if name in kinds.STORED
    }
    path.write_text(json.dumps({"messages": messages, "records": records}, indent=1) + "\n")
    return path


if __name__ == "__main__":
    written = write(metadata.version("slackwater"))
    found = msgspec.json.decode(written.read_bytes())
    print(f"{written}: {len(found['messages'])} messages, {len(found['records'])} records")  # noqa: T201
