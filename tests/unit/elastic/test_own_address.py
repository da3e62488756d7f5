"""The address that rank 0 tells the other hosts."""

from collections.abc import Iterator

import pytest

from slackwater.elastic.run import own_address


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    own_address.cache_clear()
    yield
    own_address.cache_clear()


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::1", "[::1]"),
        ("localhost", "localhost"),
        ("nowhere.invalid", "127.0.0.1"),
    ],
)
def test_a_name_that_means_nothing_is_not_told(
    told: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACKWATER_ADDRESS", told)
    assert own_address() == address
