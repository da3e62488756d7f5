"""Scaling the cluster by goodput (Qiao, thesis, section 3.5.4).

The utility of a cluster is the goodput of its jobs over what it would be if each of its GPUs gave
what a lone GPU gives:

    utility = sum_j GOODPUT_j(a_j) / GOODPUT_j(1) / GPUs

Above `up` (U = 2/3) the cluster grows, below `down` it shrinks, to the number of machines whose
predicted utility is nearest to `to` (L = 1/2) when its jobs share it equally. The published policy
only grows (`down` = 0). A few rounds are averaged first: a job that restarts or was just found to
be parallel is not a reason to buy machines.

The throughput-driven scaling that it is compared with (Or et al.) is the same rule on jobs whose
agents take every example for equally useful (a noise scale of infinity).
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import msgspec
import numpy as np

from slackwater.common.domains.models.goodput import GoodputModel
from slackwater.services.master.scheduling.policies.pollux_search import Ints
from slackwater.services.master.scheduling.view import ClusterView

AVERAGED_ROUNDS = 5


class Candidate(NamedTuple):
    """A job as far as scaling is concerned."""

    model: GoodputModel | None
    gpus_max: int
    """To how many it may grow in the next round."""
    row: Ints
    """The job's GPUs on each machine."""


class History(msgspec.Struct, frozen=True):
    """Utilities of the last rounds with an unchanged cluster."""

    utilities: tuple[float, ...] = ()
    nodes: int = 0


def desired_nodes(
    cluster: ClusterView,
    jobs: Sequence[Candidate],
    history: History,
    down: float,
    to: float,
    up: float,
    nodes_max: int = 0,
) -> tuple[int, History]:
    """How many machines, and the history to keep. `nodes_max`: how many there may be; 0: those that
    are known, up or not."""
    node_gpus = max(1, cluster.node_gpus_max)
    nodes = sum(1 for node in cluster.nodes if node.gpus)
    now = sum(_ratio(j.model, int(j.row.sum()), int(np.count_nonzero(j.row))) for j in jobs)
    utilities = history.utilities if history.nodes == nodes else ()
    utilities = (*utilities, now / max(1, cluster.gpus))[-AVERAGED_ROUNDS:]
    history = History(utilities, nodes)
    if len(utilities) < AVERAGED_ROUNDS:
        return nodes, history
    utility = sum(utilities) / len(utilities)
    if down <= utility <= up:
        return nodes, history
    # No further than the jobs may grow in one round: beyond that nothing was measured.
    reach = max(1, ceil(sum(job.gpus_max for job in jobs) / node_gpus))
    sizes = (
        range(1, nodes)
        if utility < down
        else range(nodes + 1, (nodes_max or len(cluster.nodes)) + 1)
    )
    within = [n for n in sizes if n <= reach] or [nodes]
    return min(within, key=lambda n: (abs(_predict(jobs, n, node_gpus) - to), n)), history


def _predict(jobs: Sequence[Candidate], nodes: int, node_gpus: int) -> float:
    """Utility of so many machines if the jobs share them equally."""
    gpus = nodes * node_gpus
    share = max(1, gpus // len(jobs))
    running = min(len(jobs), gpus)
    total = 0.0
    for job in jobs[:running]:
        size = min(share, job.gpus_max)
        total += _ratio(job.model, size, ceil(size / node_gpus))
    return total / gpus


def _ratio(model: GoodputModel | None, gpus: int, nodes: int) -> float:
    """Goodput over that of one GPU. Who was never measured is believed to scale perfectly."""
    if gpus == 0:
        return 0.0
    if model is None:
        return float(gpus)
    now, alone = model.best_goodput(np.array([nodes, 1]), np.array([gpus, 1]))
    return float(now / alone) if alone > 0 else float(gpus)
