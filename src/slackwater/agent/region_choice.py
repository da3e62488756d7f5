"""Choose the class for a granted region: by whether it is mapped, and whom its updates wait for."""

from slackwater.agent.attachment import Attached
from slackwater.agent.on_device import staged
from slackwater.agent.region_access import InPlace
from slackwater.agent.snapshot import Snapshot, Snapshots, StagedSnapshot
from slackwater.agent.virtual_slots import VirtualInPlace, VirtualStaged, VirtualStaging
from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.domains.slots.layout import Geometry, bucket_plan
from slackwater.common.domains.slots.rows import width_of
from slackwater.common.transport.base import Channel, RemoteRegion
from slackwater.common.transport.gpu import Device
from slackwater.schemas.placement import JobPlan


async def attach(
    channel: Channel,
    remote: RemoteRegion,
    plan: JobPlan,
    bucket: WorkerBucket,
    rank: int,
    device: Device | None,
) -> Attached:
    """Raises Unavailable, AccessRefused, Rejected (no region of this bucket), Fatal (no room)."""
    geometry = Geometry.of(bucket_plan(plan, bucket.tensors), bucket.layout)
    if plan.consistency != "synchronous":
        copies = bucket.staging
        if not isinstance(copies, Snapshots):
            bucket.staging = copies = Snapshots(geometry.elements, geometry.dtype)
        if remote.view is not None:
            return Snapshot(remote, plan.job, bucket.index, rank, copies)
        made = await StagedSnapshot.attach(channel, remote, geometry, rank, copies)
        assert isinstance(made, StagedSnapshot)
        made.width = width_of(bucket.tensors)
        return made
    if plan.virtual:
        if remote.view is not None:
            return VirtualInPlace(remote, plan.job, bucket.index, rank)
        bucket.staging = lanes = bucket.staging or VirtualStaging(geometry.elements, geometry.dtype)
        return await VirtualStaged.attach(channel, remote, geometry, rank, lanes)
    if remote.view is not None and device is None:
        return InPlace(remote, plan.job, bucket.index, rank)
    kind, bucket.staging = staged(bucket.staging, geometry, device)
    return await kind.attach(channel, remote, geometry, rank, bucket.staging)
