"""The dashboard of a live cluster in a browser: it shows what the cluster says, and acts if let."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import Request, urlopen

import pytest
import pytest_asyncio
from tests.browser import Seen, chromium, opened

from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.loadgen.replay.workload import emulated
from slackwater.schemas.jobs import JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
# A browser, and a cluster with five jobs: some seconds each.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    chromium()
    options = ClusterOptions(controllers=1, aggregators=2, nodes=2, gpus_per_node=4, lenders=1)
    async with EmbeddedCluster(options) as made, connect(made.url) as client:
        long = "import time\nfor i in range(9999): print('step', i, flush=True); time.sleep(0.2)"
        program = (sys.executable, "-c", long)
        await client.submit(JobSpec(id="gpus", program=program, gpus=4, tenant="vision"))
        await client.submit(JobSpec(id="queued", program=program, gpus=8, workers=2))
        await client.submit(JobSpec(id="fails", program=(sys.executable, "-c", "exit(3)")))
        await client.submit(
            emulated(
                "shares", "alexnet", workers=2, servers=2, iterations=100_000, compute_s=0.05,
                bytes_scale=0.01, seed=1,
            )
        )  # fmt: skip
        yield made


@asynccontextmanager
async def web(cluster: EmbeddedCluster, *options: str) -> AsyncIterator[dict[str, Any]]:
    """Run `slackwater web` beside the cluster; what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slackwater.cli.main", "web", "--port", "0", "--json",
        "--url", cluster.url, *options, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        text = b""
        while b"}" not in text:
            line = await asyncio.wait_for(process.stdout.readline(), 30.0)
            assert line, "it ended"
            text += line
        yield json.loads(text)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30.0) == 0


def api(url: str, path: str) -> Any:
    """Ask as a script does."""
    base, _, key = url.partition("?key=")
    request = Request(base.rstrip("/") + path, headers={"Authorization": f"Bearer {key}"})
    with urlopen(request, timeout=10) as answer:
        return json.load(answer)


async def shown(seen: Seen, id: str) -> list[str]:
    """Return the cells of a row once it is there."""
    found: list[str] = await seen.until(
        "(id) => { const row = document.querySelector(`.tr[data-id='${id}']`);"
        " return row && [...row.children].map((each) => each.textContent); }",
        id,
    )
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_it_shows_what_the_cluster_says(cluster: EmbeddedCluster) -> None:
    async with web(cluster) as told, opened(told["url"]) as seen:
        page = seen.page
        assert re.match(r"http://127.0.0.1:\d+/$", page.url), "the key is not left in the address"
        await seen.until("() => sw.data.kind('jobs').size >= 4 && sw.data.kind('nodes').size === 2")
        await seen.until("() => sw.data.get('jobs', 'gpus').state === 'running'")
        await seen.until("() => sw.data.get('jobs', 'fails').state === 'failed'")
        await seen.until(
            "() => [...document.querySelectorAll('.tile')].some((each) => "
            "each.textContent.includes('4 of 8'))"
        )
        state = await asyncio.to_thread(api, told["url"], "/api/state")
        for kind in ("jobs", "nodes", "aggregators", "tenants", "lenders"):
            mine = await page.evaluate("(kind) => Object.fromEntries(sw.data.kind(kind))", kind)
            assert mine.keys() == state["changes"][kind].keys(), kind
        jobs = state["changes"]["jobs"]
        gpus = await page.evaluate("() => sw.page.charts().gpus.values()")
        assert gpus["rows"][0][-1] == jobs["gpus"]["has"] == 4, "the chart's last point"
        text = await page.inner_text(".attention")
        assert "job fails failed" in text
        await seen.go("#/jobs")
        row = await shown(seen, "gpus")
        assert row[:4] == ["gpus", "running", "vision", "4/4"]
        assert (await shown(seen, "queued"))[-1].startswith("waits for 8 GPUs")
        await seen.go("#/nodes")
        assert (await shown(seen, "w1"))[1] == "up"
        await seen.go("#/events")
        await seen.until("() => document.body.textContent.includes('fails failed')")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_job_has_a_page_with_its_life_and_its_log(cluster: EmbeddedCluster) -> None:
    async with web(cluster) as told, opened(told["url"] + "#/jobs/gpus") as seen:
        page = seen.page
        await seen.until("() => document.querySelector('.log')?.textContent.includes('step 3')")
        lines = await page.evaluate("() => document.querySelector('.log').textContent.length")
        await seen.until("(n) => document.querySelector('.log').textContent.length > n", lines)
        await seen.until("() => document.querySelector('.stretch.state-running')")
        facts = await page.inner_text("dl.facts")
        assert "4 GPUs" in facts
        assert "time.sleep(0.2)" in facts
        assert await page.locator(".actions button").count() == 0, "read-only"
        await seen.go("#/jobs/shares")
        await seen.until(
            "() => sw.page.element.querySelectorAll('table.plain tbody tr').length === 2"
        )
        await seen.until("() => document.querySelector('h1').textContent === 'shares'")
        document = await asyncio.to_thread(api, told["url"], "/api/jobs/shares?record")
        assert document["record"]["spec"]["model"] == "alexnet"
        assert [each[0] for each in document["ranks"]] == [0, 1]


@pytest.mark.asyncio(loop_scope="module")
async def test_it_is_full_again_after_a_restart_and_a_page_finds_the_way_back(
    cluster: EmbeddedCluster, tmp_path: Any
) -> None:
    key = tmp_path / "key"
    async with web(cluster, "--key-file", str(key)) as first:
        port = first["url"].partition("127.0.0.1:")[2].partition("/")[0]
        async with opened(first["url"]) as seen:
            await seen.until("() => sw.data.kind('lives').has('fails')")
            before = await seen.page.evaluate("() => sw.data.kind('events').size")
            assert before > 3
        # Its address stays: the second one has the same port and key.
    async with web(cluster, "--key-file", str(key), "--port", port) as second:
        assert second["url"] == first["url"]
        assert (os.stat(key).st_mode & 0o777) == 0o600
        async with opened(second["url"]) as seen:
            await seen.until("(n) => sw.data.kind('events').size >= n", before)
            await seen.until("() => sw.data.kind('lives').get('fails').stretches.length >= 2")


@pytest.mark.asyncio(loop_scope="module")
async def test_who_signs_in_acts_as_that_user_of_the_bus(cluster: EmbeddedCluster) -> None:
    async with connect(cluster.url) as client:
        await client.submit(
            JobSpec(id="victim", program=(sys.executable, "-c", "import time; time.sleep(999)"))
        )
        credentials = cluster.url.partition("//")[2].rpartition("@")[0]
        user, _, password = credentials.partition(":")
        address = f"{cluster.url.partition('//')[0]}//{cluster.url.rpartition('@')[2]}"
        assert address != cluster.url, "the cluster's bus has users"
        async with web(cluster, "--actions") as told, opened(told["url"] + "#/jobs/victim") as seen:
            page = seen.page
            page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
            await page.click("text=pause")
            await page.fill("input[name=user]", user)
            await page.fill("input[name=password]", "wrong")
            await page.click("button[type=submit]")
            await seen.until("() => !document.querySelector('dialog .alert').hidden")
            await page.fill("input[name=password]", password)
            await page.click("button[type=submit]")
            await seen.until("() => document.querySelector('.chip.state-paused')")
            await page.click("text=resume")
            await seen.until("() => document.querySelector('.chip.state-running')")
            await page.click("text=cancel")
            await seen.until("() => document.querySelector('.chip.state-cancelled')")
            refused = [each for each in seen.complaints if "401" in each or "403" in each]
            assert len(refused) == len(seen.complaints), seen.complaints
            seen.complaints.clear()
        assert (await client.job("victim")).state == "cancelled"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_nothing_is_cut_or_unreadable(
    cluster: EmbeddedCluster, width: int, dark: bool
) -> None:
    async with web(cluster) as told, opened(told["url"], width=width, dark=dark) as seen:
        await seen.until("() => sw.data.kind('jobs').size >= 4")
        for path in ("#/", "#/jobs", "#/nodes", "#/aggregators", "#/memory", "#/tenants",
                     "#/events", "#/jobs/gpus"):  # fmt: skip
            await seen.go(path)
            await asyncio.sleep(0.3)
            wide = await seen.page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= width, f"{path} is {wide} pixels wide"
            assert await seen.page.evaluate(CONTRAST) == [], path


CONTRAST = """() => {
  // Text whose color differs too little from what is behind it (WCAG's ratio, 3 for large text).
  const parse = (color) => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(parse(getComputedStyle(at).backgroundColor));
    }
    let color = [255, 255, 255];
    for (const [r, g, b, a] of layers.reverse()) {
      color = [r, g, b].map((each, i) => (each * a + color[i] * (255 - a)) / 255);
    }
    return color;
  };
  const wrong = [];
  for (const element of document.querySelectorAll('#app *')) {
    const text = [...element.childNodes]
      .filter((each) => each.nodeType === 3 && each.textContent.trim());
    if (!text.length || !element.offsetParent || element.closest('.u-wrap')) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 3.9) wrong.push(`${text[0].textContent.trim()}: ${ratio.toFixed(2)}`);
  }
  return wrong;
}"""


@pytest.mark.asyncio(loop_scope="module")
async def test_keys_lead_everywhere(cluster: EmbeddedCluster) -> None:
    async with web(cluster) as told, opened(told["url"]) as seen:
        page = seen.page
        await seen.until("() => sw.data.kind('jobs').size >= 4")
        await page.keyboard.press("2")
        await shown(seen, "fails")
        await page.keyboard.press("/")
        await page.keyboard.type("state:failed")
        await seen.until("() => document.querySelectorAll('.tr').length === 1")
        await page.keyboard.press("Enter")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        await seen.until("() => location.hash === '#/jobs/fails'")
        await page.keyboard.press("Escape")
        await seen.until("() => location.hash === '#/jobs'")
        before = await page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        await page.keyboard.press("t")
        after = await page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert before != after
        await page.keyboard.press("?")
        assert "filter" in await page.inner_text("dialog")


async def run(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slackwater.cli.main", "web", *words,
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(process.communicate(), 60.0)
    return process.returncode or 0, said.decode()


@pytest.mark.asyncio(loop_scope="module")
async def test_bad_options_say_what_to_do(cluster: EmbeddedCluster, tmp_path: Any) -> None:
    async with web(cluster) as told:
        port = told["url"].partition("127.0.0.1:")[2].partition("/")[0]
        code, said = await run("--url", cluster.url, "--port", port)
        assert (code, "choose another --port" in said) == (78, True), said
    short = tmp_path / "key"
    short.write_text("short\n")
    code, said = await run("--url", cluster.url, "--key-file", str(short))
    assert (code, "at least 24 characters" in said) == (78, True), said
    code, said = await run("--url", cluster.url, "--no-key", "--key-file", str(short))
    assert (code, "choose one" in said) == (78, True), said
    code, said = await run("--url", "nats://127.0.0.1:9", "--port", "0")
    assert (code, "no nats-server answers" in said) == (69, True), said
