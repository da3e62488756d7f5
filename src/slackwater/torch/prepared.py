"""`slackwater.torch.Prepared`: a data set whose samples are prepared once and then read back.

Reading, decoding and resizing often cost more than training. What they gave is kept in a spill
store: in memory as far as that goes, then in the idle memory of other machines, then on disk
(memory/spill/spill_server.py). So each epoch after the first reads its samples back, in whatever
order, by whichever of a DataLoader's workers. A sample for which there is no room, or that is lost
with its lender, is prepared again.
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
        """`memory_bytes`, `remote_bytes`, `disk_bytes`: at most so much is kept in each; at least
        one of them. `folder`: for what is on disk. `url` of the bus: whose lenders are used; with
        it `credentials`, `resilience`, `transport` and `node`. Make it before the DataLoader that
        uses it. Raises Rejected, Unavailable."""
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
        """A DataLoader asks for a whole batch."""
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
        """Samples `found` and `missing` so far, `kept`, `refused` for want of room, `unreadable`;
        and what each tier has: `memory_blobs`, `memory_bytes`, `remote_...`, `disk_...`."""
        return self._spill_server.figures()

    def close(self) -> None:
        """Drop all kept samples. The end of the program does so, too."""
        self._spill_server.close()

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
