"""Checkpoints in virtual time: real aggregators save while buckets travel and aggregators die.

The director leads them as the controller does, by the same state machine. Whatever a folder counts
as whole is what a replay has at that iteration, bit for bit, of every bucket.
"""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.sim.test_data_plane import (
    BUCKETS,
    HOMES,
    LAYOUTS,
    PLAN,
    TENSORS,
    Cluster,
    Rank,
    arrange,
    check,
    expected,
    faults,
    travel,
)

from slackwater.common.base import checkpoint_folder, codec
from slackwater.common.base.checkpoint_folder import CheckpointFolder
from slackwater.common.base.errors import Retryable
from slackwater.common.domains.slots.saved_bucket import read_part
from slackwater.common.shell.simulated_loop import SimLoop
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, Message, Refused
from slackwater.schemas.checkpoints import (
    BucketsCopied,
    BucketsWritten,
    CopyBuckets,
    WriteBuckets,
)
from slackwater.schemas.placement import BucketPlace
from slackwater.services.controller.checkpoint_state import Checkpoint

LOOK_S = 0.02


async def asked(cluster: Cluster, id: str, verb: str, message: Message) -> Any:
    """Ask once; None: nobody answers."""
    subject = subjects.command("aggregator", id, verb)
    try:
        raw = await cluster.bus.request(subject, codec.encode(message), timeout_s=1.0)
    except Retryable:
        return None
    return codec.decode(raw, BucketsCopied | BucketsWritten | Refused)


async def save(cluster: Cluster, folder: Path, number: int, lives: Iterator[int]) -> Checkpoint:
    """Lead one checkpoint to its end. The last one has the name of the one before, which its leader
    left in the middle: a controller that was restarted begins anew what is asked for again."""
    made = Checkpoint(f"r{number}", str(folder), BUCKETS, True, begun_s=0.0, life=next(lives))
    while not made.over:
        now_s = cluster.clock.now_s()
        homes = {
            id: [b for b in range(BUCKETS) if cluster.places[b].aggregator == id] for id in HOMES
        }
        homes = {id: buckets for id, buckets in homes.items() if buckets}
        for id, buckets in homes.items():
            if made.phase == "writing":
                await write(cluster, made, id, buckets, now_s)
            elif not made.over:
                message = CopyBuckets(
                    job=PLAN.job, request=made.request, attempt=made.attempt,
                    buckets=tuple(buckets), version=made.version, look=made.phase == "looking",
                )  # fmt: skip
                answer = await asked(cluster, id, "copy", message)
                if isinstance(answer, BucketsCopied):
                    made.told(id, buckets, answer.now, answer.copied)
                elif answer is not None:
                    made.begin_anew("a bucket is elsewhere", now_s)
        if made.phase in ("looking", "copying") and made.heard >= homes.keys():
            made.decide(now_s)
        await asyncio.sleep(LOOK_S * cluster.rng.random())
    return made


async def write(
    cluster: Cluster, made: Checkpoint, id: str, buckets: list[int], now_s: float
) -> None:
    message = WriteBuckets(
        job=PLAN.job, request=made.request, attempt=made.attempt,
        layouts=tuple(LAYOUTS[bucket] for bucket in buckets), tensors=TENSORS, parts=BUCKETS,
        iteration=made.iteration, folder=made.folder,
    )  # fmt: skip
    answer = await asked(cluster, id, "write", message)
    if isinstance(answer, Refused) or (isinstance(answer, BucketsWritten) and answer.lacking):
        made.begin_anew("a copy is gone", now_s)
    elif isinstance(answer, BucketsWritten):
        assert not answer.reason
        made.wrote(id, answer.written, answer.nbytes, now_s)


def look_into(folder: Path) -> set[int]:
    """Return the iterations that the folder counts, each of which is a replay's."""
    there = CheckpointFolder(folder, checkpoint_folder.BUCKETS)
    found = set()
    for parts in there.sets():
        for part in parts:
            assert not there.damage(part)
            ((first, end, arrays),) = read_part(folder / part.file).pieces
            assert (first, end) == (0, LAYOUTS[part.part].elements)
            wanted = expected(part.part, part.iteration)
            assert arrays[0].tobytes() == wanted.tobytes(), part
        found.add(parts[0].iteration)
    return found


async def story(seed: int, folder: Path, *, shared: bool, kills: int) -> list[Checkpoint]:
    cluster = Cluster(seed, shared=shared)
    monkeypatch = pytest.MonkeyPatch()
    arrange(monkeypatch, cluster, lossy=False)
    saved: list[Checkpoint] = []
    lives = count(1)

    async def saving() -> None:
        while True:
            saved.append(await save(cluster, folder, len(saved), lives))

    try:
        await cluster.begin()
        await cluster.host()
        ranks = [Rank(cluster, rank) for rank in range(2)]
        background = [asyncio.create_task(travel(cluster)), asyncio.create_task(saving())]
        breaking = asyncio.create_task(faults(cluster, kills))
        last = 0
        while not breaking.done():
            last += 3
            await asyncio.gather(*(rank.train(last) for rank in ranks))
        await breaking
        for task in background:
            assert not task.done(), task
            task.cancel()
        await check(cluster, ranks, last)
        for id in HOMES:  # The last move may have ended when nobody looked any more.
            for bucket in await cluster.held(id):
                cluster.places[bucket] = BucketPlace(aggregator=AggregatorId(id))
        saved.append(await save(cluster, folder, len(saved), lives))
        for rank in ranks:
            await rank.close()
        assert saved[-1].iteration == last, "it stands still: its newest is saved"
        return saved
    finally:
        monkeypatch.undo()
        cluster.close()


@pytest.mark.parametrize("shared", [True, False], ids=["one-host", "two-hosts"])
@pytest.mark.parametrize("seed", range(8))
def test_what_a_folder_counts_is_what_a_replay_has(seed: int, shared: bool, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        saved = runner.run(story(seed, tmp_path, shared=shared, kills=12))
    done = {made.iteration for made in saved if made.phase == "done"}
    assert done, saved
    assert done <= look_into(tmp_path)
