"""Take the pictures of the guides: a live cluster with jobs, seen in the dashboard.

    python -m tests.pictures [FOLDER]     # docs/images by default; a minute

Tests take the same ones, sooner, and look whether what stands in them can be read.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any, Final

from tests.browser import Seen, opened

from slackwater.client import AsyncClient
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster
from slackwater.loadgen.replay.workload import emulated
from slackwater.schemas.jobs import JobSpec

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {"overview": "#/", "jobs": "#/jobs", "job": "#/jobs/vgg19", "nodes": "#/nodes"}
OPTIONS: Final = ClusterOptions(
    controllers=1, aggregators=4, cpu_share=0.2, nodes=3, gpus_per_node=4, lenders=2,
    master={"gpu_policy": "tiresias-las"},
)  # fmt: skip
SAYS: Final = "import time\nfor i in range({n}): print('step', i, flush=True); time.sleep(0.25)"
LEGIBLE: Final = """() => {
  // Texts that lie over one another, or leave the page; those scrolled out of sight do not count.
  const clipped = (element, box) => {
    let { left, right, top, bottom } = box;
    for (let at = element; at; at = at.parentElement) {
      if (getComputedStyle(at).overflowY === 'visible') continue;
      const seen = at.getBoundingClientRect();
      [left, right] = [Math.max(left, seen.left), Math.min(right, seen.right)];
      [top, bottom] = [Math.max(top, seen.top), Math.min(bottom, seen.bottom)];
    }
    return { left, right, top, bottom };
  };
  const wrong = [];
  const boxes = [];
  for (const element of document.querySelectorAll('#app *')) {
    const text = [...element.childNodes]
      .filter((each) => each.nodeType === 3).map((each) => each.textContent.trim()).join(' ');
    if (!text.trim() || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(element);
    for (const each of range.getClientRects()) {
      const box = clipped(element, each);
      if (box.right - box.left < 1 || box.bottom - box.top < 4) continue;
      if (box.right > innerWidth + 1 || box.left < -1) wrong.push(`${text} leaves the page`);
      boxes.push({ text, element, box });
    }
  }
  for (let i = 0; i < boxes.length; i += 1) {
    for (let j = i + 1; j < boxes.length; j += 1) {
      const [a, b] = [boxes[i], boxes[j]];
      if (a.element.contains(b.element) || b.element.contains(a.element)) continue;
      if (a.element.closest('header') !== b.element.closest('header')) continue;
      const across = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
      const along = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
      if (across > 2 && along > 4) wrong.push(`"${a.text}" lies over "${b.text}"`);
    }
  }
  return wrong;
}"""


async def work(client: AsyncClient, scale: float) -> None:
    """Submit jobs that share aggregators and jobs that take GPUs by turns, over some seconds."""
    for seed, model in enumerate(("vgg19", "alexnet", "resnet50")):
        spec = emulated(
            model, model, workers=2, servers=2, iterations=100_000, compute_s=0.1,
            bytes_scale=0.02, seed=seed,
        )  # fmt: skip
        await client.submit(spec)
    for number, (gpus, steps) in enumerate(((4, 60), (8, 60), (2, 90), (4, 40), (8, 30), (2, 20))):
        program = (sys.executable, "-c", SAYS.format(n=round(steps * scale)))
        tenant = ("vision", "language")[number % 2]
        await client.submit(
            JobSpec(
                id=f"train-{number + 1}", program=program, gpus=gpus, workers=gpus, tenant=tenant
            )
        )
        await asyncio.sleep(2.5 * scale)


async def take(folder: Path, scale: float) -> dict[str, list[str]]:
    """Take the pictures. `scale`: 1 for half a minute of work. Return by page what cannot be
    read."""
    from tests.integration.web.test_dashboard import web

    found: dict[str, list[str]] = {}
    async with EmbeddedCluster(OPTIONS) as cluster, AsyncClient.connect(cluster.url) as client:
        await work(client, scale)
        await asyncio.sleep(10 * scale)
        async with web(cluster) as told, opened(told["url"], height=900) as seen:
            await seen.until("() => sw.data.kind('lives').size >= 9")
            for name, path in PAGES.items():
                await shown(seen, path)
                found[name] = await seen.page.evaluate(LEGIBLE)
                await seen.page.screenshot(path=folder / f"web-{name}.png")
    return found


async def shown(seen: Seen, path: str) -> None:
    await seen.go(path)
    await seen.until("() => sw.data.connection() === 'live'")
    await asyncio.sleep(1.5)  # Charts are drawn, and the job's page is loaded.


def main(words: list[str]) -> None:
    folder = Path(words[0]) if words else ROOT / "docs" / "images"
    found: Any = asyncio.run(take(folder, 1.0))
    wrong = {name: texts for name, texts in found.items() if texts}
    if wrong:
        sys.exit(f"not legible: {wrong}")


if __name__ == "__main__":
    main(sys.argv[1:])
