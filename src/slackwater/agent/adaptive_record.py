"""AdaptiveRecord: appends what an adaptive program changed to a file of JSON lines."""

from pathlib import Path

import msgspec

from slackwater.common.domains.models.adaptive_batch import AdaptiveChange


class AdaptiveRecord:
    """A program that goes on appends to the file that it has begun."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, change: AdaptiveChange) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(change) + b"\n")


def read(path: str | Path) -> list[AdaptiveChange]:
    """Return the changes in order of time; a last line that was cut off is left out."""
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=AdaptiveChange) for line in lines if line]
