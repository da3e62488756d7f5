"""Messages of every kind at a cluster that runs (messages.py)."""

import asyncio
from pathlib import Path

import pytest
from tests.chaos.messages import definitions, storm

from slackwater.common.shell import ServiceDefinition

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[ServiceDefinition]:
    return definitions(tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize(
    "count",
    [
        3_000,
        pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3500)]),
    ],
)
def test_no_message_ends_a_service_and_each_request_is_answered(
    made: list[ServiceDefinition],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a minute, most of it the cluster's start and end."""
    monkeypatch.chdir(tmp_path)  # A folder that a message names is made there.
    told = asyncio.run(storm(made, count, seed=count))
    assert not told.wrong, told.wrong[:5]
    assert told.sent > 0.95 * count
    assert min(told.answered["done"], told.answered["refused"]) > 0.05 * count
