"""Every report ends with a page that opens as a file: no server, no complaint, the same values."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.browser import opened

from slackwater.loadgen.samples import PHILLY


async def loadgen(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slackwater.loadgen.cli.main", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 100.0)
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_simulation_and_a_comparison_open_as_files(tmp_path: Path) -> None:
    """Takes some seconds: two simulations and a browser."""
    policies = ("--policy", "fifo", "--policy", "tiresias-las", "--nodes", "4")
    one, two, side = tmp_path / "one", tmp_path / "two", tmp_path / "side"
    assert (await loadgen("simulate", str(PHILLY), *policies, "--report", str(one)))[0] == 0
    fast = ("--gpus-per-node", "8")
    made = await loadgen("simulate", str(PHILLY), *policies, *fast, "--report", str(two))
    assert made[0] == 0, made
    async with opened((one / "index.html").as_uri()) as seen:
        summary = json.loads((one / "summary.json").read_text())
        text = await seen.page.inner_text("main")
        assert "tiresias-las" in text
        assert f"{summary[0]['jobs']}" in text
        await seen.until("() => document.querySelectorAll('.chart canvas').length === 4")
        await seen.go("#/jobs")
        await seen.until("() => document.querySelectorAll('.tr').length > 10")
        id = await seen.page.evaluate("() => document.querySelector('.tr').dataset.id")
        await seen.go(f"#/jobs/{id}")
        await seen.until("(id) => document.querySelector('h1').textContent === id", id)
    code, said, _ = await loadgen("compare", str(one), str(two), "--report", str(side), "--json")
    assert code == 0
    found = json.loads(said)
    assert [(each["a"], each["b"]) for each in found] == [("fifo",) * 2, ("tiresias-las",) * 2]
    async with opened((side / "index.html").as_uri()) as seen:
        text = await seen.page.inner_text("main")
        assert f"{found[0]['mean_ratio']:.3f}" in text
    code, said, _ = await loadgen(
        "compare", str(one), str(one), "--of", "fifo", "--against", "tiresias-las"
    )
    assert code == 0
    assert "fifo and tiresias-las" in said
    assert "jobs that both have" in said


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("nosuch", "nosuch"), 2, "no results.json can be read there"),
        (("{report}", "{report}", "--of", "nosuch"), 65, "has no 'nosuch': choose one of a"),
        (("{broken}", "{report}"), 65, "results.json: "),
        (("{report}", "{report}", "--report", "/proc/x"), 65, "cannot be written"),
    ],
)
async def test_comparing_says_what_is_wrong(
    tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    report, broken = tmp_path / "report", tmp_path / "broken"
    for folder, text in ((report, '{"title": "t", "sets": {"a": {}}}'), (broken, '{"title": 3}')):
        folder.mkdir()
        (folder / "results.json").write_text(text)
    given = [word.format(report=report, broken=broken) for word in words]
    found, _, err = await loadgen("compare", *given)
    assert (found, says in err) == (code, True), err
