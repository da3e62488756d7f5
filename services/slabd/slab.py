"""One slab of a lender, as its core knows it."""

from dataclasses import dataclass

from slackwater.schemas.memory import SlabId, SlabInfo, SlabState


@dataclass(slots=True)
class Slab:
    """`session` 0: its device is not connected."""

    id: SlabId
    state: SlabState
    generation: int = 0
    device: str = ""
    session: int = 0
    span: int = 0
    member: int = 0
    secret: str = ""
    hold_s: float = 0.0
    since_s: float = 0.0
    asked_s: float = 0.0
    """EVICT was sent."""

    def info(self) -> SlabInfo:
        """For operators."""
        return SlabInfo(
            slab=self.id,
            state=self.state,
            generation=self.generation,
            device=self.device,
            span=self.span,
            since_s=self.since_s,
        )
