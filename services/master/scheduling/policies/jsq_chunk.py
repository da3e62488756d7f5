"""JSQ-Chunk: the nodes in chunks of equal size, a first-come first-served queue for each.

The comparator of Lin et al. (2018), section V-B, from Berg et al. (2017): an arriving job joins the
queue with the fewest jobs (the lowest index among equals) and runs alone on its chunk, never
preempted. floor(W / chunk) chunks; the rest of the nodes is idle. The best chunk size is found by
trying (the paper: 7 to 40 of 100 nodes).
"""

from math import inf
from typing import Any

import msgspec

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.words import number_of
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.elastic import resize
from slackwater.services.master.scheduling.registry import Count, register
from slackwater.services.master.scheduling.rules import Rule
from slackwater.services.master.scheduling.view import JobView, Pending, Plan, View


class Chunks(msgspec.Struct):
    """The memory: each chunk's jobs, the running one first, and who is in which chunk."""

    queues: list[list[JobId]]
    chunk_of: dict[JobId, int]
    gpus: int


class ChunkFacts(msgspec.Struct, frozen=True):
    """Each chunk's jobs must not be forgotten when the master restarts, nor how many GPUs there
    were."""

    queues: list[list[JobId]]
    gpus: int


@register("jsq-chunk")
class JsqChunk:
    elastic = divisible = True
    honours = frozenset[Rule]({"min_run_s"})

    def __init__(self, chunk: Count = 16) -> None:
        self.chunk = chunk

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        chunks = self._updated(view, memory)
        sizes = {}
        for queue in chunks.queues:
            if queue:
                job = view.jobs[queue[0]]
                size = job.held_gpus or self._size(job, view)
                if size:
                    sizes[job.id] = size
        # After a loss of machines one queue may have several running jobs: the protected go on.
        kept = [] if view.rules.min_run_s <= 0 else list(view.jobs.values())
        kept = [j for j in kept if j.id not in sizes and view.rules.protects(j, view.now_s)]
        sizes |= {job.id: job.held_gpus for job in kept}
        next_s = min((job.since_s + view.rules.min_run_s for job in kept), default=inf)
        running = {job_id: job for job_id in sizes if (job := view.jobs[job_id]).allocation}
        return Plan(resize(view, running, sizes), next_decision_s=next_s), chunks

    def _updated(self, view: View, memory: Chunks | None) -> Chunks:
        if memory is None or memory.gpus != view.cluster.gpus:
            return self._rebuilt(view)
        changed = view.changed
        if changed is None:
            changed = [*memory.chunk_of, *view.jobs]
        for job_id in dict.fromkeys(changed):
            if job_id in memory.chunk_of and job_id not in view.jobs:
                memory.queues[memory.chunk_of.pop(job_id)].remove(job_id)
        news = {job_id for job_id in changed if job_id not in memory.chunk_of}
        arrivals = [view.jobs[job_id] for job_id in news if job_id in view.jobs]
        for job in sorted(arrivals, key=lambda job: job.number):
            self._join(memory, job)
        return memory

    def _rebuilt(self, view: View) -> Chunks:
        """Running jobs keep a chunk each, the others join the shortest queues by submission."""
        nodes = view.cluster.gpus
        count = max(1, nodes // self.chunk) if nodes else 0
        chunks = Chunks([[] for _ in range(count)], {}, nodes)
        if count:
            order = sorted(view.jobs.values(), key=lambda j: (not j.allocation, j.number))
            for job in order:
                self._join(chunks, job)
        return chunks

    def _join(self, chunks: Chunks, job: JobView) -> None:
        if chunks.queues:
            index = min(range(len(chunks.queues)), key=lambda i: len(chunks.queues[i]))
            chunks.queues[index].append(job.id)
            chunks.chunk_of[job.id] = index

    def _size(self, job: JobView, view: View) -> int:
        """0 where too few nodes are up for it."""
        if self.chunk < min(job.gpus_min, view.cluster.gpus):
            raise ConfigRejected(
                f"job {job.id} needs {number_of(job.gpus_min, 'GPU')} at least, more than a "
                f"chunk of {self.chunk}; set a larger jsq-chunk.chunk"
            )
        size = min(self.chunk, view.cluster.gpus, job.gpus_max)
        return size if size >= job.gpus_min else 0

    facts = ChunkFacts

    def durable(self, memory: Chunks) -> ChunkFacts:
        return ChunkFacts(memory.queues, memory.gpus)

    def restored(self, facts: ChunkFacts) -> Chunks:
        queues = [list(queue) for queue in facts.queues]
        chunk_of = {job_id: i for i, queue in enumerate(queues) for job_id in queue}
        return Chunks(queues, chunk_of, facts.gpus)

    def explain(self, view: View, memory: Any) -> list[Pending]:
        answers = []
        for job in sorted(view.jobs.values(), key=lambda job: job.number):
            if not job.allocation:
                where = memory.chunk_of.get(job.id) if memory is not None else None
                ahead = 0 if where is None else memory.queues[where].index(job.id)
                answers.append(
                    Pending(
                        job.id, "order", f"chunk {where} of {number_of(self.chunk, 'GPU')}", inf,
                        f"jobs before it in the queue of chunk {where}: {ahead}",
                    )
                )  # fmt: skip
        return answers
