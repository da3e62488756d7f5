"""Copies of buckets on their way into a checkpoint: taken at one version, while training goes on.

A fold writes into the buffers that the version word does not select. So a bucket's buffers of
version v stay as they are until version v + 2 is folded, and a copy of v is taken by the thread
that has just committed it, before it folds anything else; or, where the bucket stands still at v or
v + 1, by any thread, which looks again afterwards.
"""

from dataclasses import dataclass

from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.saved_bucket import BucketCopy
from slackwater.common.domains.slots.saved_pieces import Distances
from slackwater.schemas.base import IdText
from slackwater.services.aggregator.early_fold import Parts


@dataclass(slots=True, eq=False)
class Copying:
    """The order to copy one bucket at a version; None: at any, of a job whose updates are not
    synchronous."""

    request: IdText
    attempt: int
    version: int | None
    copy: BucketCopy | None = None
    distances: Distances | None = None
    """How far its pieces are from what was saved last."""
    written: bool = False
    writing: bool = False
    failure: str = ""

    def committed(self, slots: SlotRegion) -> None:
        """Copy the version that the calling thread has just committed, if it is the one."""
        if self.copy is None and self.version in (None, slots.version):
            self.copy = BucketCopy.of(slots, slots.version)

    def look(self, slots: SlotRegion, parts: Parts, came_at: int) -> None:
        """Copy the version where it stands still, in any thread. `came_at`: the version that the
        bucket came here with; its other buffers may hold anything then."""
        version = slots.version if self.version is None else self.version
        if self.copy is not None or not _still(slots, parts, version, came_at):
            return
        copy = BucketCopy.of(slots, version)
        if _still(slots, parts, version, came_at) and self.copy is None:
            self.copy = copy


def _still(slots: SlotRegion, parts: Parts, version: int, came_at: int) -> bool:
    """Say whether nobody writes to the buffers of `version` before a later push comes."""
    newest = slots.version
    if not slots.initialized or newest not in (version, version + 1):
        return False
    if newest == version:
        return True
    return version >= came_at and not (parts.begun or max(slots.all_pushed()) > newest)
