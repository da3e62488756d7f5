"""Lines that a running cluster answers: exit code and text. One small cluster for all of them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster

# The cluster takes some seconds to start, on a busy machine many.
pytestmark = [
    pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as cluster:
        yield cluster.url


async def said(url: str, *words: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLACKWATER_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slackwater.cli.main", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=environment | {"SLACKWATER_URL": url},
    )  # fmt: skip
    text = (await process.communicate())[0].decode()
    assert "Traceback" not in text
    assert process.returncode is not None
    return process.returncode, text


async def test_jobs_that_nobody_knows(url: str) -> None:
    for command in (("job",), ("cancel",), ("logs",), ("wait",)):
        code, text = await said(url, *command, "nosuch")
        assert (code, text.count("\n")) == (65, 1), text
        assert text.startswith("error: ")
        assert "nosuch" in text


async def test_a_job_is_submitted_once_and_another_under_its_id_is_refused(
    url: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text('id = "twice"\nprogram = ["sleep", "60"]\ntenant = "ünï [bold] x"\n')
    line = ("submit", "--file", str(file))
    assert await said(url, *line) == (0, "job twice is stored\n")
    code, text = await said(url, *line)
    assert (code, text.startswith("job twice was stored before")) == (0, True)
    code, text = await said(url, "submit", "--id", "twice", "--", "sleep", "61")
    assert (code, "twice exists with another spec" in text) == (65, True)
    code, text = await said(url, "job", "twice")
    assert (code, "ünï [bold] x" in text) == (0, True)
    assert await said(url, "cancel", "twice") == (0, "job twice is cancelled\n")


async def test_a_drain_is_taken_back_once(url: str) -> None:
    assert (await said(url, "drain", "nosuch"))[0] == 65
    nothing = (0, "a1 was not being drained: nothing changed\n")
    assert await said(url, "drain", "a1", "--cancel") == nothing
    code, text = await said(url, "drain", "a1")
    if code == 65:  # It serves no cluster yet: nothing can be drained, and that is said.
        assert "serve no cluster" in text or "serves no cluster" in text
        return
    assert code == 0
    assert await said(url, "drain", "a1", "--cancel") == (0, "a1 serves again\n")
