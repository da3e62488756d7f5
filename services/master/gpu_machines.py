"""Machines with GPUs, bought and returned as the GPUs' policy asks (Qiao, thesis, section 3.5.4).

A policy says how many machines it would like (`Plan.desired_nodes`). Those with the fewest GPUs in
use go first, and none with a job that may not be paused or that has slots; their jobs pause, to go
on elsewhere. Without any GPU job for `autoscale_period_s` the least number of machines is wanted.
"""

from typing import Final

from slackwater.schemas.base import NodeId
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.services.master.autoscaling import Verb
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.jobs import Job
from slackwater.services.master.lifecycle import advance, leave
from slackwater.services.master.state import State

POOL: Final = "gpus"


class GpuMachines:
    """Scaled (autoscaling.py)."""

    pool, noun = POOL, "node"
    adds: Verb = "add"
    returns: Verb = "return"

    def __init__(self) -> None:
        self._idle_since_s: float | None = None
        """Since when there is no GPU job; None: there is one."""

    def bounds(self, config: MasterConfig) -> tuple[int, int]:
        return config.autoscale_nodes_min, config.autoscale_nodes_max

    def have(self, state: State, now_s: float) -> list[NodeId]:
        return [
            beat.node
            for beat, alive in state.nodes.heartbeats(now_s)
            if alive and beat.gpus and beat.node not in state.nodes.leaving
        ]

    def wanted(self, state: State, have: int, now_s: float) -> int:
        self._note_idle(state, now_s)
        asked, idle_s = state.gpus.nodes_wanted, self._idle_since_s
        if idle_s is not None and now_s >= idle_s + state.config.autoscale_period_s:
            return state.config.autoscale_nodes_min
        return have if asked is None else asked

    def _note_idle(self, state: State, now_s: float) -> None:
        snapshot = state.gpus.snapshot
        if snapshot.jobs or snapshot.hidden:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
            state.gpus.nodes_wanted = None  # It was wanted for jobs that are gone.

    def returnable(self, state: State, have: list[NodeId]) -> tuple[NodeId, ...]:
        """List machines whose jobs may all be paused, least used first."""
        found = []
        for node in have:
            jobs = _holders(state, node)
            if all(job.record.spec.gpus and job.record.spec.preemptible for job in jobs):
                held = sum(n for j in jobs for place, n in j.record.allocation if place == node)
                found.append((held, node))
        return tuple(node for _, node in sorted(found))

    def hold(self, state: State, names: frozenset[NodeId]) -> None:
        state.nodes.leaving = names

    def vacate(self, state: State, names: frozenset[NodeId], now_s: float) -> None:
        vacate(state, names, now_s)

    def busy(self, state: State, name: NodeId) -> bool:
        return bool(_holders(state, name) or state.nodes.runs(name))

    def silent(self, state: State, name: NodeId, now_s: float) -> bool:
        return state.nodes.silent(name, now_s)

    def told(self, state: State, have: int) -> str:
        asked, cost = state.gpus.nodes_wanted, have * state.config.autoscale_node_hour_cost
        wanted = "" if asked is None else f", {asked} wanted"
        return wanted + (f", {cost:g} an hour" if state.config.autoscale_node_hour_cost else "")


def _holders(state: State, node: NodeId) -> list[Job]:
    return [
        job
        for job in state.unsettled.values()
        if any(place == node for place, _ in (*job.record.allocation, *job.record.planned))
    ]


def vacate(state: State, nodes: frozenset[NodeId], now_s: float) -> None:
    """Pause the GPU jobs that these machines have, or are about to, if they may be."""
    for job in {job.id: job for node in sorted(nodes) for job in _holders(state, node)}.values():
        record = job.record
        stops = record.state == "stopping" and not any(at in nodes for at, _ in record.planned)
        may = record.spec.gpus and record.spec.preemptible and not record.resizing
        if record.state in HOLDING_STATES and not stops and may:
            preemptions = record.preemptions + 1
            reason = "its machine is taken away; it goes on elsewhere"
            leave(state, job, (), now_s, preemptions=preemptions, reason=reason)
            advance(state, job)
