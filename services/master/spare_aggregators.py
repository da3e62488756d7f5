"""Aggregators of the pool, started and stopped with demand: what is saved is really free.

Wanted are as many more as the last request for aggregators lacked; fewer, once some were free all
through `autoscale_period_s`. Only free ones are returned: what a cluster does not need it gives
back by itself (recycling, scaling.py of the controller).
"""

from typing import Final

from slackwater.schemas.base import AggregatorId, NodeId
from slackwater.services.master.autoscaling import Verb
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.state import State

POOL: Final = "aggregators"
LACKED_S: Final = 15.0
"""Seconds for which a request that was refused counts: whoever still lacks any asks again."""


class SpareAggregators:
    """Scaled (autoscaling.py)."""

    pool, noun = POOL, "aggregator"
    adds: Verb = "add-aggregators"
    returns: Verb = "return-aggregators"

    def __init__(self) -> None:
        self._spare = 0
        """The least number that was free since `_since_s`."""
        self._since_s: float | None = None

    def bounds(self, config: MasterConfig) -> tuple[int, int]:
        most = config.autoscale_aggregators_max
        return (config.autoscale_aggregators_min, most) if most else (0, 0)

    def have(self, state: State, now_s: float) -> list[NodeId]:
        return [NodeId(id) for id in state.pool.serving()]

    def wanted(self, state: State, have: int, now_s: float) -> int:
        free, (lacked, at_s) = len(state.pool.free()), state.pool.lacked
        if lacked and now_s - at_s <= LACKED_S:
            self._since_s = None
            return have + max(0, lacked - free)
        if self._since_s is None:
            self._since_s, self._spare = now_s, free
        self._spare = min(self._spare, free)
        if now_s < self._since_s + state.config.autoscale_period_s:
            return have
        spare, self._since_s = self._spare, None
        return have - spare

    def returnable(self, state: State, have: list[NodeId]) -> tuple[NodeId, ...]:
        return tuple(NodeId(id) for id in reversed(state.pool.free()))

    def hold(self, state: State, names: frozenset[NodeId]) -> None:
        state.pool.leaving = frozenset[str](names)

    def vacate(self, state: State, names: frozenset[NodeId], now_s: float) -> None:
        """Nothing is there: only free ones are returned."""

    def busy(self, state: State, name: NodeId) -> bool:
        return state.pool.serves(AggregatorId(name))

    def silent(self, state: State, name: NodeId, now_s: float) -> bool:
        return not state.pool.is_alive(AggregatorId(name))

    def told(self, state: State, have: int) -> str:
        return f", {len(state.pool.free())} free"
