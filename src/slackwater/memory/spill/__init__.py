"""Blobs that do not fit into memory: in tiers, for programs with and without an event loop."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackwater.memory.spill.spill import DiskTier, MemoryTier, RemoteTier, SpillStore
    from slackwater.memory.spill.spill_server import SpillServer, Tiers

__all__ = ["DiskTier", "MemoryTier", "RemoteTier", "SpillServer", "SpillStore", "Tiers"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a store alone does not need the server."""
    if name in ("SpillServer", "Tiers"):
        from slackwater.memory.spill import spill_server

        return getattr(spill_server, name)
    if name in __all__:
        from slackwater.memory.spill import spill

        return getattr(spill, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
