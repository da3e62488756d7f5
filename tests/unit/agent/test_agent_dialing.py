"""An Agent insists on one transport, and says why it cannot have it."""

import pytest

from slackwater.agent.address_choice import dial, forced_transport
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import Endpoint


@pytest.mark.parametrize(
    ("given", "environment", "forced"),
    [
        (None, None, None),
        (None, "", None),
        (None, "auto", None),
        (None, "tcp", "tcp"),
        ("shm", None, "shm"),
        ("shm", "tcp", "shm"),
        ("auto", "tcp", None),
        ("tcp", "nonsense", "tcp"),
    ],
)
def test_the_program_counts_before_the_environment(
    given: str | None, environment: str | None, forced: str | None
) -> None:
    assert forced_transport(given, environment) == forced


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ("rdma", "tcp", "transport 'rdma': choose shm, verbs, tls, tcp or auto"),
        ("", None, "transport '': choose"),
        (None, "TCP", "SLACKWATER_TRANSPORT 'TCP': choose"),
    ],
)
def test_an_unknown_one_is_rejected(given: str | None, environment: str | None, said: str) -> None:
    with pytest.raises(Rejected, match=said):
        forced_transport(given, environment)


async def test_a_forced_one_that_is_not_offered_is_named() -> None:
    endpoint = Endpoint(aggregator=AggregatorId("a1"), addresses=(("shm", "host!/a1.sock"),))
    with pytest.raises(Unavailable, match=r"tcp is forced.*it offers shm"):
        await dial(endpoint, b"", {}, "tcp")
