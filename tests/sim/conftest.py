from collections.abc import Iterator

import pytest

from slackwater.loadgen.simulator.control.grants import check_held


@pytest.fixture(autouse=True)
def services_do_what_they_may() -> Iterator[None]:
    yield
    check_held()
