"""A bus for commands that talk to no services."""

from collections.abc import Iterator

import pytest

from slackwater.common.bus.server import NatsServer


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server without services; yield its URL."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server.url
