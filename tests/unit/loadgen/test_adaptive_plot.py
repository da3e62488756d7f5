"""A record becomes a picture; without a line there is nothing to draw."""

from pathlib import Path

import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.adaptive_batch import AdaptiveChange
from slackwater.loadgen.adaptive_plot import draw


def test_a_record_is_drawn_also_while_goodput_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "record.png"
    first = AdaptiveChange(100.0, 8, 0.1, 32, 32, 0, 1.0, 1.0)
    draw([first, AdaptiveChange(131.5, 900, 2.0, 256, 64, 3, 5.5, 0.8, 700.0, 9000.0)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(Rejected, match="has no line"):
        draw([], path)
