"""Choose the address of an aggregator that this worker uses: the best transport that both ends
share."""

import os
from collections.abc import Mapping
from typing import Final

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, Retryable, Unavailable
from slackwater.common.bus.access import Credentials, ends_of
from slackwater.common.bus.relay import find_ticket
from slackwater.common.transport.base import Channel, Fabric
from slackwater.common.transport.gpu import Device
from slackwater.common.transport.host import elsewhere, host_identity, split_identity
from slackwater.common.transport.negotiate import live_fabrics, rank
from slackwater.common.transport.shm import ShmFabric
from slackwater.schemas.placement import Endpoint

AUTO: Final = "auto"
FORCIBLE: Final = ("shm", "verbs", "tls", "tcp")


def forced_transport(given: str | None, environment: str | None) -> str | None:
    """The only kind to be used, None: the best that both ends have. What the program gives counts
    before SLACKWATER_TRANSPORT. Raises Rejected."""
    source = "transport" if given is not None else "SLACKWATER_TRANSPORT"
    wanted = given if given is not None else environment or AUTO
    if wanted == AUTO:
        return None
    if wanted not in FORCIBLE:
        raise Rejected(f"{source} {wanted!r}: choose {', '.join(FORCIBLE)} or {AUTO}")
    return wanted


def agent_fabrics(device: Device | None) -> dict[str, Fabric]:
    """Return the fabrics by which a worker connects; with a device, shm also opens memory
    that peers of this host have on it."""
    ticket = find_ticket(os.environ)
    if ticket is None:
        allowed, tls = frozenset[int](), ends_of(Credentials.from_environment(os.environ))
    else:  # The service's account may be another one than ours.
        allowed, tls = frozenset({ticket.service}), ticket.tls()
    return {**live_fabrics(tls=tls), "shm": ShmFabric(device=device, allowed_uids=allowed)}


async def dial(
    endpoint: Endpoint, hello: bytes, fabrics: Mapping[str, Fabric], transport: str | None
) -> Channel:
    """The first address that answers, best first; `transport`: only this kind. Raises Unavailable
    with what each of them said."""
    errors: list[str] = []
    for kind, address in usable(endpoint, fabrics, transport):
        try:
            return await fabrics[kind].connect(address, hello, deadline_s=limits.CONNECT_S)
        except (Retryable, Rejected) as error:
            errors.append(f"{kind}: {error}")
    offered = ", ".join(kind for kind, _ in endpoint.addresses)
    insisted = f" ({transport} is forced)" if transport is not None else ""
    raise Unavailable("; ".join(errors) or f"no transport in common{insisted}, it offers {offered}")


def usable(
    endpoint: Endpoint, fabrics: Mapping[str, Fabric], transport: str | None
) -> list[tuple[str, str]]:
    """Shared memory is the only choice where it is one: while an aggregator of this host restarts,
    its other addresses may be up first, and would be kept."""
    known = [
        (kind, address)
        for kind, address in sorted(endpoint.addresses, key=lambda offer: rank(offer[0]))
        if kind in fabrics and transport in (None, kind)
    ]
    here = [
        (kind, address)
        for kind, address in known
        if kind == "shm" and split_identity(address)[0] and not elsewhere(address, host_identity())
    ]
    return here or known
