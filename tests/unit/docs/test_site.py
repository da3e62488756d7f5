"""The documentation's site is built without a warning: every link, anchor and picture is there."""

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
WAITED_FOR = ("quickstart", "tour", "troubleshooting", "faq", "guide/compare", "guide/web")


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Takes some seconds: about a hundred pages."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for page in WAITED_FOR:
        assert (tmp_path / f"{page}.html").is_file(), page


def test_every_guide_is_in_the_navigation() -> None:
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    guides = [f"guide/{path.name}" for path in (ROOT / "docs" / "guide").glob("*.md")]
    assert [guide for guide in guides if guide not in nav] == []
