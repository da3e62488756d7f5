"""`slackwater.torch.Prepared`: a data set whose samples are prepared once and then read back.

Reading, decoding and resizing often cost more than training. Prepared samples are kept in a spill
store: in memory until that is full, then in the idle memory of other machines, then on disk
(memory/spill/spill_server.py). Each epoch after the first reads its samples back, in any order; any
worker of a DataLoader can read any sample. A sample that finds no room, or is lost with its lender,
is prepared again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.memory.spill import SpillServer, Tiers
from slackwater.torch.samples import pack, unpack


class Prepared(torch.utils.data.Dataset[Any]):  # type: ignore[misc]  # mypy does not read torch.
    """Wraps a map-style `dataset`, whose samples must be the same in every epoch; what is random
    (augmentation) goes into `transform`, which is applied to each sample that is read back."""

    def __init__(
        self,
        dataset: Any,
        *,
        memory_bytes: int,
        remote_bytes: int = 0,
        disk_bytes: int = 0,
        folder: Path | None = None,
        url: str = "",
        transform: Callable[[Any], Any] | None = None,
        **tiers: Any,
    ) -> None:
        """Open the store. Make it before the DataLoader that uses it.

        `memory_bytes`, `remote_bytes`, `disk_bytes` limit each tier; give at least one. `folder`
        is for the disk tier. `url` is the bus of the cluster whose lenders are used; with it come
        `credentials`, `resilience`, `transport` and `node`. Raises Rejected, Unavailable."""
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise Rejected(
                f"a {type(dataset).__name__} has no samples by number: give a map-style data set"
            )
        self._dataset = dataset
        self._transform = transform
        self._spill_server = SpillServer(
            Tiers(
                memory_bytes=memory_bytes,
                remote_bytes=remote_bytes,
                disk_bytes=disk_bytes,
                folder=folder,
                url=url,
                **tiers,
            ),
            limits.SPILL_SAMPLES_MAX,
        )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch: a DataLoader calls this with all its indices."""
        found = self._spill_server.get([str(index) for index in indices])
        return [
            self._finished(self._prepare(index) if blob is None else unpack(blob))
            for index, blob in zip(indices, found, strict=True)
        ]

    def _prepare(self, index: int) -> Any:
        sample = self._dataset[index]
        self._spill_server.put(str(index), pack(sample))
        return sample

    def _finished(self, sample: Any) -> Any:
        return sample if self._transform is None else self._transform(sample)

    def figures(self) -> dict[str, int]:
        """Count samples: `found`, `missing`, `kept`, `refused` (no room), `unreadable`; and the
        contents of each tier: `memory_blobs`, `memory_bytes`, `remote_...`, `disk_...`."""
        return self._spill_server.figures()

    def close(self) -> None:
        """Drop all kept samples. The end of the program does so, too."""
        self._spill_server.close()

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
