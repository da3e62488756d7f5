"""Placement policies by name. Third parties register theirs as entry points of the group
`slackwater.placement_policies`; each is a class without arguments that fits `view.Policy`."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final

from slackwater.common.errors import ConfigRejected
from slackwater.services.controller.policies.cyclic import Cyclic
from slackwater.services.controller.policies.edf import Edf
from slackwater.services.controller.policies.packed import Packed
from slackwater.services.controller.policies.static import Static
from slackwater.services.controller.policies.view import Policy

GROUP: Final = "slackwater.placement_policies"
POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "cyclic": Cyclic,
    "edf": Edf,
    "packed": Packed,
    "static": Static,
}


def load_policy(name: str) -> Policy:
    """Raises ConfigRejected for a name that nobody registered."""
    if name in POLICIES:
        return POLICIES[name]()
    for point in entry_points(group=GROUP, name=name):
        policy: Policy = point.load()()
        return policy
    known = sorted({*POLICIES, *(point.name for point in entry_points(group=GROUP))})
    raise ConfigRejected(f"there is no placement policy {name!r}; known are {', '.join(known)}")
