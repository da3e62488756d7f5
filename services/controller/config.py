"""A cluster controller's configuration."""

from typing import Annotated

import msgspec

from slackwater.common.shell.config import ServiceConfig
from slackwater.schemas.base import IdText

Duration = Annotated[float, msgspec.Meta(gt=0.0)]
Fraction = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


class ControllerConfig(ServiceConfig, kw_only=True, frozen=True):
    """Fields with unit, default and meaning. `id` is the aggregator cluster."""

    id: IdText = "c0"
    """The cluster: its controller answers under this id."""
    policy: str = "edf"
    """Placement of a job that names none: `edf`, `cyclic` (the paper's), `static`, or an entry
    point's name."""
    divide_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes; a larger tensor of a synchronous job is divided into buckets of this size, each of
    which migrates between two pushes; they are placed one by one. 0: a tensor is never divided."""
    loss_limit: Annotated[float, msgspec.Meta(gt=0.0, le=0.999)] = 0.1
    """LossLimit: the share of its standalone speed that a job may lose by sharing."""
    pack_alone: bool = False
    """A job alone in its cluster gets as few aggregators as its policy finds enough; false: it
    keeps those that it asked for, and loses nothing (AutoPS, figures 7 and 10)."""
    usable_reduced: Fraction = 0.67
    """Fraction of an aggregator's cycle that may be filled once a job has lost speed there."""
    reverts_max: Annotated[int, msgspec.Meta(ge=0, le=100)] = 3
    """A job is reverted at most so often in its life. Where nobody may be reverted any more, the
    job that loses gets its own aggregators; 0: no assignment is undone for a loss."""
    congested_at: Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)] = 2.0
    """Times as long as when the job was profiled: a byte to or from an aggregator that takes so
    much longer, while the job loses more than loss_limit, has a congested link; 0: no link has."""
    congestion_s: Duration = 300.0
    """Seconds for which an aggregator with a congested link is left alone after the last sign."""
    unprofiled_after_s: Duration = 20.0
    """Seconds that a new job waits for its temporary aggregators; then fewer, or shared ones."""
    hung_after_s: Duration = 60.0
    """Seconds without an iteration after which a job gives up the aggregators that it has for its
    profiling alone: it shares, unprofiled. Half of it where others wait for aggregators."""
    host_s: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 60.0
    """Seconds over which other work on aggregators' machines is watched: what takes half of them
    or more leaves aggregators of whole cores less time for jobs that come; 0: nothing does."""
    network_fill: Fraction = 0.8
    """Fraction of a link's budget that placements may fill, of machines that say theirs: gradients
    come in bursts, and what else the link carries is a mean."""
    rehost_after_s: Duration = 15.0
    """Seconds without a sign of an aggregator after which its buckets go elsewhere, their optimiser
    state lost. Its supervisor's word that it starts it anew is a sign."""
    aggregator_mtbf_s: Duration = 2_592_000.0
    """Seconds in which an aggregator is expected to lose its memory once, before it was watched: so
    follows how often jobs are saved that leave it to their controller."""
    save_every_min_s: Duration = 10.0
    """Seconds between two saves of such a job at least, and between the first ones."""
    migration_s: Duration = 15.0
    """Seconds between two looks at who holds what while a migration has not finished."""
    worker_done_s: Duration = 5.0
    """Seconds to wait for WORKER_DONE once all is copied: a job that ended pushes no more."""
    resync_s: Duration = 15.0
    """Seconds between two comparisons of each aggregator's buckets with the records."""
    scaling_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Seconds between two scalings, when unused aggregators are given back and little used ones
    emptied; 0: with every exit."""
    on_demand_min: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """With scaling_s: a profiled job that needs fewer new aggregators than this stays on its
    temporary ones until the period ends."""
    keep_demand: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """With scaling_s: which part of the aggregators that were in use over the last period, on
    average, stays allocated at its end though idle; 0: none."""
    retry_s: Duration = 5.0
    """Seconds before an allocation that was refused is asked for again; doubles up to 60."""
    tick_s: Duration = 1.0
    """Seconds between two looks at what is lost, late or to be told."""
