"""Placement policies by name. Third parties register theirs as entry points of the group
`slackwater.placement_policies`; each is a class without arguments that fits `view.Policy`."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final

from slackwater.common.base.errors import ConfigRejected
from slackwater.services.controller.policies.cyclic import Cyclic
from slackwater.services.controller.policies.edf import Edf
from slackwater.services.controller.policies.packed import Packed
from slackwater.services.controller.policies.static import Static
from slackwater.services.controller.policies.view import Defaults, Policy

GROUP: Final = "slackwater.placement_policies"
POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "cyclic": Cyclic,
    "edf": Edf,
    "packed": Packed,
    "static": Static,
}


NEEDED: Final = (
    "adapts", "private", "order", "prefers", "assign", "free", "explains", "plans",
)  # fmt: skip
"""Members that a policy must have; `view.Defaults` provides all but `assign`."""


def known_policies() -> list[str]:
    """List every registered name."""
    return sorted({*POLICIES, *(point.name for point in entry_points(group=GROUP))})


def load_policy(name: str) -> Policy:
    """Raises ConfigRejected for a name that nobody registered, and for a class that lacks a part of
    a policy."""
    if name in POLICIES:
        return POLICIES[name]()
    for point in entry_points(group=GROUP, name=name):
        policy: Policy = point.load()()
        missing = [part for part in NEEDED if not hasattr(policy, part)]
        if missing:
            raise ConfigRejected(
                f"the placement policy {name!r} ({point.value}) has no {', '.join(missing)}: "
                f"derive it from {Defaults.__module__}.{Defaults.__name__}"
            )
        return policy
    raise ConfigRejected(
        f"there is no placement policy {name!r}; known are {', '.join(known_policies())}"
    )
