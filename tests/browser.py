"""A headless Chromium for tests of pages: whatever it complains about fails the test."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
LOOK_MS = 50
WITHIN_MS = 30_000


def chromium() -> str:
    """Return the browser's path. Where there is none the test is skipped, or fails where
    SLACKWATER_BROWSER=required says that there has to be one."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        why = "no Chromium on this machine: `make setup-browser` installs it"
        if os.environ.get("SLACKWATER_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    return found


class Seen:
    """A page, and what its console and its scripts complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", self._said)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    async def until(self, script: str, argument: Any = None) -> Any:
        """Wait until the script gives something true, and return it."""
        handle = await self.page.wait_for_function(
            script, arg=argument, polling=LOOK_MS, timeout=WITHIN_MS
        )
        return await handle.json_value()

    async def go(self, path: str) -> None:
        await self.page.evaluate("(path) => { location.hash = path; }", path)


@asynccontextmanager
async def opened(
    url: str, *, width: int = 1280, height: int = 800, dark: bool = False
) -> AsyncIterator[Seen]:
    """Open the address. Raises AssertionError afterwards if the page complained."""
    path = chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            context = await browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
            )
            seen = Seen(await context.new_page())
            await seen.page.goto(url)
            yield seen
            assert not seen.complaints, seen.complaints
        finally:
            await browser.close()
