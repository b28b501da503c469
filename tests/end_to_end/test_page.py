"""The page in a real Chromium, before a scripted engine: chat, stop, keys, images, charts."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from browser import KEY, Tab, browser, needs_chromium, tab
from fake_engine import EVERYTHING, INFO, USAGE, FakeCold, FakeEngine, FakeEngines, app_of, served
from media_files import png
from msgspec.structs import replace

from omlxd.chat import Conversation, Finished, ImagePart, TextDelta, media_of
from omlxd.front.app import create_app
from omlxd.front.http.settings import HttpSettings
from omlxd.front.owner import live
from omlxd.kv.ledger.ledger import LedgerStats

pytestmark = [pytest.mark.slow, needs_chromium]

NASTY = """# A *title*

Text with `code`, **bold**, [a link](https://evil.example/a), [a trap](javascript:alert(1)) and
![a picture](https://evil.example/x.png) <img src="https://evil.example/y.png" onerror="alert(1)">.

<script>alert(1)</script>

| a | b |
|---|---|
| 1 | <b>2</b> |

1. one
   - inner
2. two

```python
print("<i>hello</i>")
```
"""


def says(text: str) -> FakeEngine:
    pieces = [TextDelta(text[at : at + 7]) for at in range(0, len(text), 7)]
    return FakeEngine((*pieces, Finished("stop", USAGE)))


async def test_an_answer_with_thinking_calls_and_where_its_prompt_came_from():
    engine = FakeEngine(EVERYTHING)
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ask("What is there?")
        assert await page.inner_text("article.assistant .thinking summary") == "Thought"
        assert not await page.is_visible(".thoughts")
        await page.click(".thinking summary")
        await page.wait_for_selector(".thoughts > :text-is('Let me think.')")
        assert await page.inner_text(".markdown") == "I will look."
        assert await page.locator(".call").count() == 2
        assert '"path": "/tmp/a"' in await page.inner_text(".call >> nth=0")
        bar = await page.get_attribute("svg.source", "aria-label")
        assert bar == "Prompt of 100 tokens: 48 from RAM, 16 from SSD, 36 computed"
        widths = await page.eval_on_selector_all(
            "svg.source rect", "all => all.map(e => e.width.baseVal.value)"
        )
        assert widths == [480, 160, 360]
        told = await page.inner_text(".legend")
        assert "TTFT" in told and "0.25 s" in told
        # A result of each call goes back, and the answer goes on.
        engine.script = (TextDelta("Found."), Finished("stop", USAGE))
        await page.fill("#result-0", "a file")
        await page.click("text=Send results")
        await page.wait_for_selector("text=Found.")
        sent = engine.requests[-1].prompt
        assert isinstance(sent, Conversation) and len(sent.messages) >= 3


async def test_a_model_writes_text_and_never_markup():
    async with served(app_of(says(NASTY))) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ask("hello")
        assert await page.locator(".markdown img, .markdown script, .markdown b").count() == 0
        links = await page.eval_on_selector_all(".markdown a", "all => all.map(e => [e.rel, e.href])")
        rel = "noopener noreferrer nofollow"
        assert links == [[rel, f"https://evil.example/{name}"] for name in ("a", "x.png", "y.png")]
        assert await page.inner_text(".markdown h3") == "A title"
        assert await page.inner_text(".markdown ol > li >> nth=0") == "one\ninner"
        assert await page.inner_text(".markdown td >> nth=1") == "<b>2</b>"
        assert await page.inner_text("figure.code code") == 'print("<i>hello</i>")'
        assert "<script>alert(1)</script>" in await page.inner_text(".markdown")
        await one.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.click("figure.code button")
        assert await page.evaluate("navigator.clipboard.readText()") == 'print("<i>hello</i>")'


async def test_the_keyboard_alone_sends_stops_edits_and_asks_again():
    engine = FakeEngine((TextDelta("It begins"), 600.0, Finished("stop", USAGE)))
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ready()
        assert await page.evaluate("document.activeElement.id") == "chat-text"
        await one.ask("wait", end=False)
        await page.wait_for_selector("text=It begins")
        assert await page.inner_text(".composer .main") == "Stop"
        await page.keyboard.press("Escape")
        await asyncio.wait_for(engine.closed.wait(), 60)
        await page.wait_for_selector("text=Stopped.")
        engine.script = (TextDelta("Another"), Finished("stop", USAGE))
        await reach(page, "Regenerate")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=Another")
        assert await page.locator("article").count() == 2
        await page.wait_for_selector("text=Regenerate")
        await reach(page, "Edit your last message")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Control+A")
        await page.keyboard.type("better")
        engine.script = (TextDelta("Edited"), Finished("stop", USAGE))
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=Edited")
        assert await page.inner_text("article.user .said") == "better"
        # The button does what the key does.
        engine.closed.clear()
        engine.script = (TextDelta("Again"), 600.0, Finished("stop", USAGE))
        await one.ask("once more", end=False)
        await page.wait_for_selector("text=Again")
        await page.click("text=Stop")
        await asyncio.wait_for(engine.closed.wait(), 60)
        # From the top of the page the first stop is the link past the header, then the views.
        await page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        await reach(page, "Status")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#status .tiles dd")


async def until(page: Any, true: str, *given: Any) -> None:
    """Wait for an expression. Playwright's own way is an `eval` in the page, which the policy forbids."""
    async with asyncio.timeout(240):
        while not await page.evaluate(true, *given):
            await asyncio.sleep(0.05)


async def reach(page: Any, name: str) -> None:
    """Press Tab until the focus is on `name`."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        found = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
        if await page.evaluate(found) == name:
            return
    raise AssertionError(f"{name} is not reached by Tab")


async def test_a_key_is_asked_for_and_kept_for_the_tab():
    app = app_of(FakeEngine(), api_key=KEY)
    async with served(app) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("401",)  # The browser's own line about the answer.
        page = await one.open()
        await page.wait_for_selector("dialog[open] >> text=asks for a key")
        await one.give_key("wrong")
        await page.wait_for_selector("dialog[open] >> text=This key is wrong")
        await one.give_key()
        await one.ready()
        await one.ask("hi")
        await page.reload()
        await one.ready()
        assert not await page.is_visible("dialog")
        assert await one.context.cookies() == []
        assert await page.evaluate("localStorage.length") == 0
        assert KEY not in page.url
        other = await one.context.new_page()
        await other.goto(url)
        await other.wait_for_selector("dialog[open]")
        await other.close()
        await page.click("text=Forget key")
        await page.wait_for_selector("dialog[open]")
        assert KEY not in await page.evaluate("JSON.stringify(sessionStorage)")


async def test_images_are_dropped_pasted_and_chosen_where_the_model_sees():
    engine, picture = FakeEngine(), png(4, 3)
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await page.wait_for_selector("text=+ Image")
        await transfer(one, "drop", picture)
        await transfer(one, "paste", picture)
        file = {"name": "c.png", "mimeType": "image/png", "buffer": picture}
        await page.set_input_files("input[type=file]", [file, file])
        await until(page, "document.querySelectorAll('.composer .thumbs img').length === 4")
        await page.click('[aria-label="Remove image 4"]')
        await page.click('[aria-label="Remove image 3"]')
        await one.ask("What is it?")
        sent = engine.requests[-1].prompt
        assert isinstance(sent, Conversation)
        assert [part.data for part in media_of(sent.messages) if isinstance(part, ImagePart)] == [picture] * 2
        shown = "all => all.every(e => e.complete && e.naturalWidth === 4)"
        assert await page.eval_on_selector_all("article .thumbs img", shown)
        assert engine.info is not None
        engine.info = replace(engine.info, images=False)
        await page.reload()
        await one.ready()
        assert not await page.is_visible("text=+ Image")
        await transfer(one, "drop", picture)
        await page.wait_for_selector("[role=alert] >> text=reads no images")
        await transfer(one, "drop", b"text", "a.txt", "text/plain")
        await page.wait_for_selector("[role=alert] >> text=a.txt is no image")
        assert INFO.images


async def transfer(one: Tab, how: str, data: bytes, name: str = "a.png", kind: str = "image/png") -> None:
    """Drop or paste a file, as the browser does."""
    script = """([how, text, name, type]) => {
        const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], name, { type }));
        const options = { bubbles: true, cancelable: true };
        const target = document.querySelector(how === "drop" ? "#chat .scroll" : "#chat-text");
        target.dispatchEvent(how === "drop" ? new DragEvent("drop", { ...options, dataTransfer: transfer })
            : new ClipboardEvent("paste", { ...options, clipboardData: transfer }));
    }"""
    await one.page.evaluate(script, [how, base64.b64encode(data).decode(), name, kind])


async def test_the_charts_move(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "PERIOD_S", 0.2)
    engine = FakeEngine()
    engine.values = {"mlx_active_bytes": 5e6, "kv_hot_bytes": 2e6, "kv_hot_budget_bytes": 4e6}
    engines: Any = FakeEngines(engine)
    none = dict.fromkeys((field.name for field in fields(LedgerStats)), 0)
    written = {"written_today_bytes": 3 * 10**9, "written_ever_bytes": 10**12}
    engines.cold = FakeCold(Path("/cache"), LedgerStats(**none | written))
    app = create_app(engines, HttpSettings(), [])
    async with served(app) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ready()
        await page.click("nav >> text=Status")
        await page.wait_for_selector(".tiles >> text=Hit rate")
        assert await page.locator(".chart >> nth=0 >> rect").count() == 0
        await page.click("nav >> text=Chat")
        await one.ask("hi")
        await page.click("nav >> text=Status")
        await page.wait_for_selector(".chart rect.ssd", state="attached")
        assert "64% of 100 prompt tokens" in await page.inner_text(".chart >> nth=0")
        seen = "document.querySelectorAll('.chart:nth-of-type(4) rect').length"
        before = await page.evaluate(seen)
        engine.values = {**engine.values, "num_requests_running": 3.0, "generation_tokens_total": 500.0}
        await until(page, f"{seen} > {before}")
        await page.wait_for_selector("text=3 running, 0 waiting")
        told = await page.inner_text("#status")
        assert "2.0 MB of 4.0 MB" in told and "Written to SSD: 3.0 GB today, 1.0 TB in all" in told
        await page.click("nav >> text=Chat")
        # The stream ends with the look, and so leaves room for the next one.
        monkeypatch.setattr(live, "MOST_VIEWERS", 1)
        await page.click("nav >> text=Status")
        await page.wait_for_selector("text=3 running")


async def test_the_policy_holds():
    async with served(app_of(FakeEngine())) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("Content Security Policy", "TrustedHTML", "Trusted")
        page = await one.open()
        for script in (
            "document.body.innerHTML = '<b>x</b>'",
            "fetch('http://127.0.0.1:9/')",
            "document.createElement('script').text = 'window.ran = 1'",
        ):
            with pytest.raises(Exception, match=r"Trusted|Failed to fetch"):
                await page.evaluate(f"async () => {{ await ({script}); }}")
        inline = """() => { const frame = document.createElement('iframe'); frame.src = 'https://evil.example/';
            document.body.append(frame); const style = document.createElement('style');
            style.textContent = 'body { display: none }'; document.body.append(style); }"""
        await page.evaluate(inline)
        assert await page.evaluate("getComputedStyle(document.body).display") == "flex"
        assert await page.evaluate("window.ran") is None
        one.problems = [each for each in one.problems if "evil.example" not in each]


async def test_a_page_of_another_site_reads_and_starts_nothing():
    engine = FakeEngine()
    async with served(app_of(engine)) as url, elsewhere() as site, browser() as chromium:
        context = await chromium.new_context()
        page = await context.new_page()
        await page.goto(site)
        ask = """async ([url, path, options]) => {
            try {
                const answer = await fetch(url + path, options); return (await answer.text()) || answer.type;
            } catch (error) { return error.name; } }"""
        body = '{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
        plain: dict[str, Any] = {"method": "POST", "body": body}
        for path in ("/", "/omlxd/status", "/omlxd/events", "/v1/models", "/web/app.js"):
            assert await page.evaluate(ask, [url, path, {}]) == "TypeError"
        typed = plain | {"headers": {"content-type": "application/json"}}
        for path in ("/v1/chat/completions", "/omlxd/cache/clear", "/omlxd/models/load"):
            assert await page.evaluate(ask, [url, path, typed]) == "TypeError"
            assert await page.evaluate(ask, [url, path, plain | {"mode": "no-cors"}]) == "opaque"
        frame = "url => { const e = document.createElement('iframe'); e.src = url; document.body.append(e); }"
        await page.evaluate(frame, url)
        await page.wait_for_timeout(500)
        assert "Ask something" not in await page.frames[1].content()
        assert engine.requests == []
        await context.close()


class elsewhere:
    """A site of somebody else: the same machine, another port."""

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        return f"http://localhost:{self.server.sockets[0].getsockname()[1]}/"

    async def __aexit__(self, *error: object) -> None:
        self.server.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 15\r\nConnection: close\r\n\r\n"
        )
        writer.write(head + b"<!doctype html>")
        await writer.drain()
        writer.close()
