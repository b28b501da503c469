"""A real Chromium for tests of the page, and what must hold whatever a test does in it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), "")

needs_chromium = pytest.mark.skipif(
    not CHROMIUM or importlib.util.find_spec("playwright") is None,
    reason="install a Chromium (`apt-get install chromium`) and `pip install playwright`",
)

KEY = "s3cret"
"""What tests have the daemon ask for."""
READY = "#chat-model option"
"""There once the page knows the models, and can send."""


class Tab:
    """A page in a context of its own. `problems`: what it said on its console, and whom else it asked."""

    def __init__(self, context: Any, page: Any, url: str):
        self.context, self.page, self.url = context, page, url
        self.problems: list[str] = []
        self.expected: tuple[str, ...] = ()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(word in message.text for word in self.expected):
            self.problems.append(f"{message.type}: {message.text}")

    async def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _asked(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(self.url).netloc:
            self.problems.append(f"asked another host: {request.url}")

    async def open(self, view: str = "chat") -> Any:
        await self.page.goto(f"{self.url}/#/{view}")
        return self.page

    async def ready(self) -> None:
        await self.page.wait_for_selector(READY, state="attached")

    async def give_key(self, key: str = KEY) -> None:
        """Type it into the dialog that asks for one, once that is there."""
        await self.page.wait_for_selector("dialog[open]")
        await self.page.keyboard.type(key)
        await self.page.keyboard.press("Enter")

    async def ask(self, text: str, end: bool = True) -> None:
        """Type and send it by the keyboard alone; wait for the end of the answer."""
        await self.page.focus("#chat-text")
        await self.page.keyboard.insert_text(text)
        await self.page.keyboard.press("Enter")
        if end:
            await self.page.wait_for_selector(".composer .main:not(.stop)")
            await self.page.wait_for_selector("article:last-child .figures .legend")


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # Chromium can't make its sandbox as root; the tests show it nothing but our own page.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield launched
        finally:
            await launched.close()


@contextlib.asynccontextmanager
async def tab(launched: Any, url: str, **options: Any) -> AsyncIterator[Tab]:
    """A tab that had nothing to complain of in the end."""
    context = await launched.new_context(**options)
    context.set_default_timeout(240_000)  # The reader of a cache has what others leave of the machine.
    try:
        made = Tab(context, await context.new_page(), url)
        yield made
        assert not made.problems, made.problems
    finally:
        await context.close()
