"""The pictures of the guides are taken from a live cluster, and everything in them can be read."""

from pathlib import Path

import pytest
from tests.browser import chromium
from tests.pictures import PAGES, ROOT, take


@pytest.mark.live
@pytest.mark.timeout(200)
async def test_every_picture_is_taken_and_legible(tmp_path: Path) -> None:
    """Takes a quarter of a minute: a cluster, nine jobs, a browser and four pages."""
    chromium()
    found = await take(tmp_path, 0.2)
    assert found == {name: [] for name in PAGES}
    for name in PAGES:
        taken = tmp_path / f"web-{name}.png"
        shown = ROOT / "docs" / "images" / taken.name
        assert taken.stat().st_size > 20_000
        assert shown.is_file(), "`python -m tests.pictures` takes it"
