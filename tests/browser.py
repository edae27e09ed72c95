"""Headless Chromium, and what a page must not do in it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: `apt-get install chromium` (Debian), or google-chrome"
)


@dataclass
class Seen:
    """A page that was gone to, and what it did wrong."""

    page: Any
    origin: str
    # Errors on the console and exceptions, but for requests that found nobody.
    errors: list[str] = field(default_factory=list)
    # Addresses of other origins that were asked for.
    elsewhere: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert self.errors == []
        assert self.elsewhere == []

    def watch(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "net::ERR_" not in message.text:
            self.errors.append(message.text)

    def _request(self, request: Any) -> None:
        if urlsplit(request.url).netloc != self.origin:
            self.elsewhere.append(request.url)

    async def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(await self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@asynccontextmanager
async def visiting(port: int, width: int = 1280, height: int = 800, **context: Any) -> AsyncIterator[Seen]:
    """/ui of the router there; `context`: of Playwright's new_context. Whatever the page did wrong fails the test."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            where = await browser.new_context(viewport={"width": width, "height": height}, **context)
            seen = Seen(await where.new_page(), f"127.0.0.1:{port}")
            seen.watch()
            await seen.page.goto(f"http://127.0.0.1:{port}/ui")
            yield seen
            seen.check()
        finally:
            await browser.close()
