"""Plans of the policies for the evaluation's cells: ours plans at least the paper's."""

import pytest

from slackwater.loadgen.replay import cells
from slackwater.loadgen.simulator.pool.planned import planned


def reduction(id: str) -> float:
    (cell,) = cells.choose([id])
    return 1.0 - planned(cell) / (cell.servers * len(cell.models))


OURS = [cell.id for cell in cells.choose(["fig8-*-edf", "table2-*-edf"])]


@pytest.mark.parametrize("id", OURS, ids=OURS)
def test_ours_plans_at_least_the_papers_saving_in_every_cell(id: str) -> None:
    (cell,) = cells.choose([id])
    assert cell.goal is not None
    assert reduction(id) >= cell.goal - 1e-9


def test_the_papers_policy_plans_its_own_cells() -> None:
    assert reduction("fig8-alexnet-x2-cyclic") == 0.25
    assert reduction("fig8-vgg19-x4-cyclic") == 0.75


def test_mixes_are_stretched_apart_by_the_cycle_and_share_by_deadline() -> None:
    """A third aggregator for one more model of another iteration time: none by deadline."""
    for mix in ("vgg19+awd-lm", "vgg19+bert-large", "vgg19+awd-lm+bert-large"):
        assert reduction(f"mix-{mix}-edf") > reduction(f"mix-{mix}-cyclic")
    assert reduction("mix-vgg19+awd-lm+bert-large-edf") == pytest.approx(2 / 3)
