"""The page behind a slab's data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.memory import trailer
from slackwater.common.domains.memory.ewma import Ewma
from slackwater.schemas.memory import SlabId

DATA = 8192


def region() -> memoryview:
    return memoryview(bytearray(DATA + trailer.TRAILER_BYTES))


def identity(generation: int = 3) -> trailer.SlabIdentity:
    return trailer.SlabIdentity(
        slab=SlabId("0123456789ab"), slab_bytes=DATA, generation=generation, device="d", secret="s"
    )


def test_a_trailer_says_whose_the_slab_is() -> None:
    memory = region()
    trailer.write(memory, trailer.LENT, identity())
    word, found = trailer.read(memory)
    assert found == identity()
    assert (trailer.fence_state(word), trailer.generation_of(word)) == (trailer.LENT, 3)


def test_the_fence_changes_alone() -> None:
    memory = region()
    trailer.write(memory, trailer.LENT, identity())
    trailer.write_fence(memory, trailer.REVOKED, 3)
    word, found = trailer.read(memory)
    assert trailer.fence_state(word) == trailer.REVOKED
    assert found == identity()


def test_a_writer_killed_in_the_middle_leaves_no_valid_trailer() -> None:
    """Every prefix of the record's bytes: refused, or the old trailer as a whole."""
    old, new = region(), region()
    trailer.write(old, trailer.LENT, identity(1))
    trailer.write(new, trailer.LENT, identity(2))
    for cut in range(DATA + 32, DATA + 256):
        torn = region()
        torn[:] = old
        torn[DATA + 32 : cut] = new[DATA + 32 : cut]
        try:
            _, found = trailer.read(torn)
        except Rejected:
            continue
        assert found == identity(1)


@given(st.binary(min_size=64, max_size=256))
def test_garbage_is_no_trailer(garbage: bytes) -> None:
    memory = region()
    memory[DATA : DATA + len(garbage)] = garbage
    with pytest.raises(Rejected):
        trailer.read(memory)


def test_a_secret_that_does_not_fit_is_refused() -> None:
    memory = region()
    with pytest.raises(Rejected, match="does not fit"):
        trailer.write(
            memory,
            trailer.LENT,
            trailer.SlabIdentity(slab=SlabId("0" * 12), slab_bytes=DATA, device="d" * 5000),
        )


def test_an_average_begins_with_its_first_sample() -> None:
    average = Ewma(0.2)
    assert average.add(10.0) == 10.0
    assert average.add(20.0) == pytest.approx(12.0)
