"""The state machine of one bucket on one aggregator. Pure: words of the region are arguments.

    empty --all offered--> seeding --seeded--> ready <--> folding
    ready or empty --frozen by a migration--> moving --copied--> gone
    moving --cancelled--> what it was

The table is `TRANSITIONS`; any of them may be removed and is then `gone`.

Synchronous training (Gu et al. 2021, section 2.1): version v + 1 is the fold of every worker's push
of iteration v + 1, once. In the other modes each push is a version of its own, and a worker is
answered when its push is applied and nobody is too far behind
(common/domains/slots/consistency.py). What is complete is read from the region's pushed words,
never counted here, so that a repeated, reordered or lost doorbell changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

from slackwater.common.base.errors import AccessRefused
from slackwater.common.base.transitions import Story
from slackwater.common.domains.slots.consistency import acknowledged, next_rank, staleness_bound
from slackwater.common.domains.slots.frames import HeldStates
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import BucketLayout, Endpoint, JobPlan
from slackwater.services.aggregator.copying import Copying
from slackwater.services.aggregator.early_fold import Ahead, Parts

Key = tuple[JobId, int]
Phase = Literal["empty", "seeding", "ready", "folding", "moving", "gone"]
TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    "empty": frozenset({"seeding", "moving", "gone"}),
    "seeding": frozenset({"empty", "ready", "gone"}),
    "ready": frozenset({"folding", "moving", "gone"}),
    "folding": frozenset({"ready", "gone"}),
    "moving": frozenset({"empty", "ready", "gone"}),
    "gone": frozenset(),
}
"""Phase -> those that may follow it. The story leaves out `folding` and the `ready` after it: every
push passes through them, so that they would push all else out of it."""


class Verdict(Enum):
    """The consequence of a doorbell."""

    WAIT = auto()
    """Others have not pushed yet, or it is being folded: DONE comes later."""
    FOLD = auto()
    """The last push came: fold."""
    DONE = auto()
    """The iteration is applied already: a retry, answered at once."""
    AWAY = auto()
    """The bucket is elsewhere, or on its way."""
    AHEAD = auto()
    """An iteration that cannot be: the one before it is not complete."""
    UNFOUNDED = auto()
    """The pushed word does not say so (a refused push's late doorbell): nothing happens."""


@dataclass(frozen=True, slots=True)
class Move:
    """MIGRATE_INIT of one bucket."""

    migration: str
    location_epoch: int
    to: Endpoint


class Offered(NamedTuple):
    """A worker's offer to fill a bare region (Offer, frames.py)."""

    version: int
    applied: tuple[int, ...]
    states: HeldStates
    wanted: int = 0


class Spare(NamedTuple):
    """A checkpoint's values in a bare region: of which iteration the newest are, and how many
    updates their states have had."""

    iteration: int
    updates: int


class SeededStates(NamedTuple):
    """Optimiser states that workers wrote into a bare region: how many updates they have had, how
    many elements of each there are, by how many versions the oldest is behind, and whose."""

    updates: int = 0
    elements: int = 0
    behind: int = 0
    ranks: tuple[int, ...] = ()

    def with_part(self, part: "SeededStates", rank: int) -> "SeededStates":
        """Return both together; parts of nothing change nothing."""
        if not part.elements:
            return self._replace(updates=max(self.updates, part.updates))
        return SeededStates(
            max(self.updates, part.updates),
            self.elements + part.elements,
            max(self.behind, part.behind),
            tuple(sorted((*self.ranks, rank))),
        )


class Bucket:
    """`channel`s are opaque numbers; each rank has at most one."""

    def __init__(
        self,
        plan: JobPlan,
        layout: BucketLayout,
        handle: int,
        nbytes: int,
        location_epoch: int,
        *,
        version: int = 0,
        applied: Sequence[int] = (),
        initialized: bool = False,
        arrived: bool = False,
    ) -> None:
        """`applied`: the region's words, of a job whose updates are not synchronous."""
        self.plan = plan
        self.layout = layout
        self.key: Key = (plan.job, layout.index)
        self.handle = handle
        self.nbytes = nbytes
        self.location_epoch = location_epoch
        self.version = version
        self.bound = staleness_bound(plan)
        self.applied = list(applied) or [0] * plan.workers
        self.active = plan.active or plan.workers
        """Ranks 0 to active - 1 count in the next version. The region's words say it of an elastic
        job: whoever has the region keeps this true."""
        self.phase: Phase = "ready" if initialized else "empty"
        self._story = Story()
        self._story.begin(self.phase, "it came" if arrived else "it is made or found")
        self.attached: dict[int, int] = {}
        self._attempts = [0] * plan.workers
        """The number of the newest process of each rank that came here."""
        self.parts = Parts(plan.workers, layout.elements)
        self.came_at = version
        """The version that it came here with, or was filled with: buffers have none before it."""
        self.copying: Copying | None = None
        """The order to copy it for a checkpoint."""
        self.saved: Floats | None = None
        """Parameters as they were saved last, piece by piece."""
        self.spare: Spare | None = None
        """The checkpoint that has filled its bare region."""
        self.move: Move | None = None
        self._folding: int | None = None
        """The rank whose push is being applied by itself, or was last."""
        self._offers: dict[int, Offered] = {}
        self.first_values = False
        """It was filled with what its program begins with."""
        self._done = [0] * plan.workers
        """The newest iteration with which each rank is done, as far as it said so."""
        self._seeder: int | None = None
        self._awaited: set[int] = set()
        """Ranks that were asked to seed it, the seeder or for parts of states, and have not yet."""
        self.states_seeded = SeededStates()
        self._was_ready = initialized
        self._heard: set[int] | None = set() if arrived else None
        """Ranks that rang here since the bucket came; None: nobody waits for WORKER_DONE."""

    def _become(self, new: Phase, why: str) -> None:
        """Change the phase. Raises InvalidTransition where the table lacks the transition."""
        thing = f"bucket {self.key[0]}/{self.key[1]} at version {self.version}"
        self._story.move(thing, self.phase, new, why, TRANSITIONS)
        self.phase = new

    def leave(self) -> None:
        """Note that the bucket has left."""
        self._become("gone", "it is removed")
        self._seeder = None
        self._awaited.clear()

    # Attachments ----------------------------------------------------------------------------------

    def greet(self, rank: int, attempt: int) -> None:
        """Raises AccessRefused for a process that another of its rank came after."""
        if attempt < self._attempts[rank]:
            newest = self._attempts[rank]
            raise AccessRefused(
                f"job {self.plan.job}, rank {rank}: process {newest} came after process {attempt}"
            )
        self._attempts[rank] = attempt

    def attach(self, rank: int, channel: int) -> int | None:
        """The channel that the rank had before, if another."""
        before = self.attached.get(rank)
        self.attached[rank] = channel
        self._withdraw(rank)
        return before if before != channel else None

    @property
    def slots(self) -> int:
        """How many slots the next version is folded of: one of each rank that counts, or those of
        all virtual ranks, whichever ranks fill them."""
        return self.plan.workers if self.plan.virtual else self.active

    @property
    def attached_active(self) -> tuple[int, ...]:
        """The attached ranks that count: the others are told nothing of versions."""
        return tuple(rank for rank in self.attached if rank < self.active)

    def resized(self, active: int) -> tuple[int, ...]:
        """Note how many count in the next version. Returns the attached ranks that did not and do
        now: the newest version is where they begin."""
        before, self.active = self.active, active
        return tuple(rank for rank in self.attached if before <= rank < active)

    def detach(self, rank: int, channel: int) -> None:
        if self.attached.get(rank) == channel:
            del self.attached[rank]
            self._withdraw(rank)

    def _withdraw(self, rank: int) -> None:
        self.parts.forget(rank)
        self._offers.pop(rank, None)
        if rank in self._awaited and self.phase == "seeding":
            self._seeder = None
            self._awaited.clear()
            self._become("empty", f"rank {rank}, which was to seed it, is away")

    # A bare region --------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """A version is complete: it can be pulled."""
        return self.phase in ("ready", "folding") or (self.phase == "moving" and self._was_ready)

    def offered(
        self,
        rank: int,
        version: int,
        applied: tuple[int, ...] = (),
        states: HeldStates = "",
        wanted: int = 0,
    ) -> tuple[int, ...]:
        """Return the ranks to ask for what they have, once all have said it: for parameters the
        lowest of the newest version, one that has the optimiser's states with them before others.
        Where none has, those that keep copies of parts are asked for these, too. `applied`: what
        the parameters contain, where the version does not say it."""
        if self.phase not in ("empty", "seeding"):
            return ()
        self._offers[rank] = Offered(version, applied, states, wanted)
        self._done[rank] = max(self._done[rank], version)
        if self.phase == "seeding":  # A rank that was asked and offers again has not heard it.
            return (rank,) if rank in self._awaited else ()
        if any(each not in self._offers for each in range(self.active)):
            return ()
        newest = max(map(self._contained, self._offers))
        has = [each for each in sorted(self._offers) if self._contained(each) == newest]
        self._seeder = next((r for r in has if self._offers[r].states == "whole"), has[0])
        asked = [self._seeder]
        if self._offers[self._seeder].states != "whole":
            asked += [
                each
                for each, offer in sorted(self._offers.items())
                if offer.states and each < self.active and each != self._seeder
            ]
        self._awaited, self.states_seeded = set(asked), SeededStates()
        self._become("seeding", f"ranks {asked} are asked")
        return tuple(asked)

    def begin_with_spare(self) -> int | None:
        """Take the checkpoint's values, where no worker has newer ones: of a synchronous job at the
        version of its other buckets, as far as the workers know one, if these have only what their
        programs gave; of others at its own, with what it says that is applied. Returns the version.
        None: some worker has newer values, or a checkpoint is not there."""
        if self.spare is None or self.phase != "seeding":
            return None
        newest = max(map(self._contained, self._offers))
        if newest and (self.bound is None or newest >= self.spare.iteration):
            return None
        wanted = max(offer.wanted for offer in self._offers.values())
        self.version = self.came_at = wanted or self.spare.iteration
        self.applied = list(map(max, self.applied, self._done))
        self._become("ready", f"a checkpoint of iteration {self.spare.iteration} is in it")
        self._awaited.clear()
        self._offers.clear()
        self._seeder = None
        return self.version

    def asked(self, rank: int) -> tuple[int, bool]:
        """Return the version that is being seeded, and whether the rank is asked for parts of
        states alone. Where no worker of a synchronous job has any parameters, those that its
        program begins with get the version of the job's other buckets: all go on together."""
        assert self._seeder is not None
        newest = self._contained(self._seeder)
        if newest == 0 and self.bound is None:
            newest = max(offer.wanted for offer in self._offers.values())
        return newest, rank != self._seeder

    def _contained(self, rank: int) -> int:
        """Return the number of updates in the parameters that the rank offers."""
        offer = self._offers[rank]
        return offer.version if self.bound is None else sum(offer.applied)

    def seeded(self, rank: int, version: int, states: "SeededStates | None" = None) -> bool:
        """Say whether the region is filled: this is the last seed that was asked for. A push of
        whose answer its worker knows is not applied again, nor is one that the seed contains.
        `states`: what the rank wrote of the optimiser's."""
        if self.phase != "seeding" or rank not in self._awaited:
            return False
        assert self._seeder is not None
        has = self._contained(self._seeder)
        if version not in (self.asked(rank)[0], has):  # An older release says what it has.
            return False
        self._awaited.discard(rank)
        self.states_seeded = self.states_seeded.with_part(states or SeededStates(), rank)
        if self._awaited:
            return False
        self.first_values = has == 0
        self._become("ready", f"rank {self._seeder} seeded it")
        self.version = self.came_at = version
        contained = self._offers[self._seeder].applied or (0,) * self.plan.workers
        self.applied = list(map(max, contained, self._done))
        self._offers.clear()
        self._seeder = None
        return True

    # Pushes ---------------------------------------------------------------------------------------

    def on_doorbell(self, rank: int, iteration: int, pushed: Sequence[int]) -> Verdict:
        """A doorbell. FOLD is said once per version: call `fold_begun` then."""
        if self.phase in ("moving", "gone"):
            return Verdict.AWAY
        if not self.initialized or rank >= self.active:
            return Verdict.UNFOUNDED
        if iteration <= self.answered(rank):
            return Verdict.DONE
        if iteration > self.answered(rank) + 1:
            return Verdict.AHEAD
        if not self.plan.virtual and pushed[rank] != iteration:
            return Verdict.UNFOUNDED
        if self._heard is not None:
            self._heard.add(rank)
        return Verdict.FOLD if self.complete(pushed) else Verdict.WAIT

    def on_partial_push(self, rank: int, iteration: int, elements: int) -> None:
        """Note that the first `elements` elements of the rank's push have arrived."""
        if iteration == self.version + 1 and self._may_begin():
            self.parts.arrived(rank, elements)

    def ahead(self, pushed: Sequence[int]) -> Ahead | None:
        """Return the part of the next version that can be folded before all of it is in."""
        if not self._may_begin():
            return None
        return self.parts.ready(self.version + 1, pushed[: self.slots])

    def _may_begin(self) -> bool:
        whole = self.bound is None and not self.plan.virtual
        return self.phase == "ready" and whole and self.move is None

    def answered(self, rank: int) -> int:
        """The iteration from which the worker may go on."""
        if self.bound is None:
            return self.version
        return acknowledged(self.applied, rank, self.bound)

    @property
    def all_answered(self) -> tuple[int, ...]:
        return tuple(map(self.answered, range(self.plan.workers)))

    def complete(self, pushed: Sequence[int]) -> bool:
        """The pushes of the next version are in, and nobody folds them yet."""
        if self.phase != "ready":
            return False
        if self.bound is None:
            return all(word == self.version + 1 for word in pushed[: self.slots])
        return self._next(pushed) is not None

    def _next(self, pushed: Sequence[int]) -> int | None:
        assert self.bound is not None
        last = self._folding if self._folding is not None else -1
        return next_rank(pushed, self.applied, self.bound, last)

    def fold_begun(self, pushed: Sequence[int] = ()) -> int | None:
        """Return the rank whose push is the next version; None: the mean of all is. Raises
        InvalidTransition when it is not ready."""
        if self.phase != "ready":
            self._become("folding", "a push is to be folded")
        self.phase = "folding"
        if self.bound is not None:
            self._folding = self._next(pushed)
            assert self._folding is not None
        return self._folding

    def fold_ended(self, version: int, applied: Sequence[int] = ()) -> tuple[int, ...]:
        """Note the region's version after a fold: unchanged if it was refused. Returns the ranks
        that may go on."""
        if self.phase == "folding":
            self.phase = "ready"
        if self.bound is None:  # The answer to all: they wait for the same version.
            before_all, self.version = self.version, version
            return self.attached_active if version > before_all else ()
        before = self.all_answered
        self.version, self.applied = version, list(applied)
        after = self.all_answered
        return tuple(rank for rank in self.attached if after[rank] > before[rank])

    def all_heard(self) -> bool:
        """True once, when every worker has pushed here after the bucket came (WORKER_DONE)."""
        if self._heard is None or len(self._heard) < self.active:
            return False
        self._heard = None
        return True

    # Moving ---------------------------------------------------------------------------------------

    def may_freeze(self, pushed: Sequence[int]) -> bool:
        """No push waits for an update and nobody works on it: it can be copied as it is. Pushes
        that are updates of their own go along, and are applied there.

        Once some workers were sent on (the epoch is the order's already: this aggregator was
        killed in the middle), nothing is waited for: they push only where they were sent to, so
        the version that others have pushed for will never be complete here.
        """
        idle = (
            self.sent_on
            or self.bound is not None
            or all(word <= self.version for word in pushed[: self.slots])
        )
        idle &= not self.parts.at_work
        return self.phase == "empty" or (self.phase == "ready" and idle)

    @property
    def sent_on(self) -> bool:
        """Say whether workers were told where the bucket goes: they push there and nowhere else."""
        return self.move is not None and self.move.location_epoch == self.location_epoch

    def freeze(self) -> None:
        """Freeze the bucket after a committed version, or while it is idle. Raises
        InvalidTransition at any other time."""
        assert self.move is not None
        self._was_ready = self.phase == "ready"
        self._become("moving", f"frozen by {self.move.migration}")
        self._offers.clear()
        self.parts.take()
        self.location_epoch = self.move.location_epoch

    def doubt(self) -> None:
        """Found after a restart in the middle of a copy to another host: frozen until the target
        accepts it, or the controller says that it stays."""
        self._was_ready = self.phase == "ready"
        self._become("moving", "found in the middle of a copy")

    def found(self, version: int, initialized: bool, applied: Sequence[int] = ()) -> None:
        """While it was on its way: what the region's words say now. Another aggregator may have
        written them since they were read here."""
        self.version, self.came_at, self._was_ready = version, version, initialized
        self.applied = list(applied) or self.applied

    def thaw(self, location_epoch: int) -> None:
        """Let the frozen bucket stay, at a place of this epoch."""
        if self.phase == "moving":
            self._become("ready" if self._was_ready else "empty", f"it stays: {location_epoch}")
        self.move = None
        self.location_epoch = max(self.location_epoch, location_epoch)

    def check_invariants(self) -> None:
        """Raises AssertionError, with the bucket's story, when its fields do not fit its phase."""
        workers, seeding = self.plan.workers, self.phase == "seeding"
        ranks = {*self.attached, *self._offers, *(self._heard or ())}
        good = {
            "with a seeder while it is seeded": seeding == (self._seeder is not None),
            "seeded by some that offered": self._awaited <= {*self._offers}
            and bool(self._awaited) == seeding,
            "offered only while it is bare": not self._offers
            or self.phase in ("empty", "seeding", "gone"),
            "folded for one rank, or for all": self.phase != "folding"
            or (self.bound is None) == (self._folding is None),
            "with a word of each worker": len(self.applied) == len(self._done) == workers,
            "known to its workers alone": all(0 <= rank < workers for rank in ranks),
        }
        broken = [what for what, holds in good.items() if not holds]
        assert not broken, f"bucket {self.key} is {self.phase}: {broken}; before: {self._story}"
