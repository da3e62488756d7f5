"""Placement policies by name. Third parties register theirs as entry points of the group
`slackwater.placement_policies`; each is a class without arguments that fits `view.Policy`."""

from typing import Final

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.registry import Registry
from slackwater.services.controller.policies.view import Defaults, Policy

_HERE: Final = "slackwater.services.controller.policies"
POLICIES: Final = Registry[Policy](
    "placement policy",
    {
        "cyclic": f"{_HERE}.cyclic:Cyclic",
        "edf": f"{_HERE}.edf:Edf",
        "packed": f"{_HERE}.packed:Packed",
        "static": f"{_HERE}.static:Static",
    },
    group="slackwater.placement_policies",
)

NEEDED: Final = (
    "adapts", "private", "order", "prefers", "assign", "free", "explains", "plans",
)  # fmt: skip
"""Members that a policy must have; `view.Defaults` provides all but `assign`."""


def known_policies() -> list[str]:
    """List every registered name."""
    return POLICIES.names()


def load_policy(name: str) -> Policy:
    """Raises ConfigRejected for a name that nobody registered, and for a class that lacks a part of
    a policy."""
    factory = POLICIES.find(name)
    policy = factory()
    if missing := [part for part in NEEDED if not hasattr(policy, part)]:
        raise ConfigRejected(
            f"the placement policy {name!r} ({factory.__module__}:{factory.__qualname__}) has no "
            f"{', '.join(missing)}: derive it from {Defaults.__module__}.{Defaults.__name__}"
        )
    return policy
