"""Find the cluster that a program talks to."""

from collections.abc import Mapping
from typing import Final

from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.bus import local_clusters

CLUSTER: Final = "SLACKWATER_CLUSTER"


def address(url: str, cluster: str, environment: Mapping[str, str]) -> str:
    """Return the bus's URL, with the token of a cluster that this account started here: of `url`,
    else of `cluster` by its name, else what SLACKWATER_URL, SLACKWATER_CLUSTER or NATS_URL say,
    else of the only cluster here, or of the one named `default`.

    Raises Unavailable when no cluster is known, Rejected when it is not clear which one is meant.
    """
    if url and cluster:
        raise Rejected(f"url {url} and cluster {cluster}: give one of them")
    if url:
        return local_clusters.carrying(url)
    name = cluster or environment.get(CLUSTER, "")
    if not cluster:
        said = environment.get("SLACKWATER_URL") or ("" if name else environment.get("NATS_URL"))
        if said:
            return local_clusters.carrying(said)
    found = local_clusters.chosen(name)
    if not found:
        raise Unavailable(
            "no cluster is known: start one with `slackwater up`, or give --url or SLACKWATER_URL"
        )
    return found
