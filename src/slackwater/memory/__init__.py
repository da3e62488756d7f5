"""Remote memory, the client side: pages that live in other machines' idle memory.

See docs/adr/0006-remote-memory.md for the parts and docs/guide/memory.md for its use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackwater.memory.array.array import RemoteArray
    from slackwater.memory.spill.spill import SpillStore

__all__ = ["RemoteArray", "SpillStore"]


def __getattr__(name: str) -> Any:
    """Loaded when it is used: the device's own modules need neither."""
    if name == "RemoteArray":
        from slackwater.memory.array.array import RemoteArray

        return RemoteArray
    if name == "SpillStore":
        from slackwater.memory.spill.spill import SpillStore

        return SpillStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
