"""The judgement of a soak on samples that are made up."""

import pytest
from tests.chaos.soak import Sample, Soak, parts

MB = 2**20


def samples(resident: list[float], descriptors: int = 20, threads: int = 3) -> list[Sample]:
    return [Sample(int(each * MB), descriptors, threads) for each in resident]


def test_what_is_filled_first_and_flat_then_has_not_grown() -> None:
    told = Soak({"master": samples([*range(10, 90), *[90.0] * 120])}, files=[7] * 200)
    told.judge()
    assert told.wrong == []


def test_memory_that_creeps_is_found() -> None:
    told = Soak({"master": samples([50.0 + 0.2 * n for n in range(200)])}, files=[7] * 200)
    told.judge()
    assert told.wrong == ["master has 71.9 MB and then 83.9 MB resident"]


@pytest.mark.parametrize(("what", "values"), [("descriptors", (20, 30)), ("threads", (3, 9))])
def test_descriptors_and_threads_that_stay_are_found(what: str, values: tuple[int, int]) -> None:
    first, then = (samples([50.0] * 140, **{what: value}) for value in values)
    told = Soak({"worker": [*first, *then[:60]]}, files=[7] * 200)
    told.judge()
    assert [told.wrong[0].split()[-1], len(told.wrong)] == [what, 1]


def test_files_that_pile_up_are_found() -> None:
    told = Soak(files=list(range(100, 300)))
    told.judge()
    assert told.wrong == ["there are 239 and then 299 files"]


def test_the_parts_are_the_halves_of_what_comes_after_filling() -> None:
    assert parts(list(range(10))) == ([4, 5, 6], [7, 8, 9])
