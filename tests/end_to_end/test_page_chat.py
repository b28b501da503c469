"""What a chat in the page keeps: old answers, drafts, the last conversation; and lists, tables, formulas."""

from __future__ import annotations

import pytest
from browser import KEY, browser, needs_chromium, tab
from fake_engine import USAGE, FakeEngine, app_of, served
from media_files import png

from omlxd.chat import Conversation, Finished, ImagePart, TextDelta, media_of
from tests.end_to_end.test_page import says, transfer, until

pytestmark = [pytest.mark.slow, needs_chromium]

WRITTEN = r"""1. **Step**
* point one
* point two
2. **Step two**

3. Done:

- [x] alpha
- [ ] beta

| name | size |
|:-:|--:|
| a<br>b | 1 | too much |
| `&lt;` &lt; |

Then \( a_1^2 \) and \[ b_1*c*d \] and $$e_2 * f * g$$.

مرحبا."""
SHAPE = """all => all.map(e => e.tagName + (e.start > 1 ? e.start : "") + e.children.length)"""


async def test_lists_tables_and_formulas():
    async with served(app_of(says(WRITTEN))) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ask("hello")
        lists = await page.eval_on_selector_all(".markdown > ol, .markdown > ul", SHAPE)
        assert lists == ["OL1", "UL2", "OL22", "UL2"]
        assert await page.inner_text(".markdown > ul >> nth=1") == "☑ alpha\n☐ beta"
        rows = await page.eval_on_selector_all(".markdown tr", "all => all.map(e => e.children.length)")
        assert rows == [2, 2, 2]
        assert await page.inner_text("tbody td >> nth=0") == "a\nb"
        assert await page.inner_text("tbody td >> nth=2") == "&lt; <"
        sides = "all => all.map(e => getComputedStyle(e).textAlign)"
        assert await page.eval_on_selector_all("thead th", sides) == ["center", "end"]
        await page.wait_for_selector(".formula math >> nth=2")
        written = await page.eval_on_selector_all(".formula", "all => all.map(e => e.title)")
        assert written == [r"\( a_1^2 \)", r"\[ b_1*c*d \]", "$$e_2 * f * g$$"], "no star is an emphasis"
        paddings = "all => all.map(e => getComputedStyle(e)).map(e => e.paddingLeft === e.paddingRight)"
        assert all(await page.eval_on_selector_all(".markdown :is(th, td)", paddings))
        flow = "all => getComputedStyle(all.at(-1)).direction"
        assert await page.eval_on_selector_all(".markdown > p", flow) == "rtl"


async def test_nothing_is_lost_by_a_stop_an_empty_edit_a_reload_or_a_new_chat():
    engine = says("The first answer")
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        await one.page.goto(url)
        page = one.page
        await one.ready()
        await one.ask("hello")
        engine.script = (600.0, Finished("stop", USAGE))
        await page.click("text=Regenerate")
        await page.wait_for_selector(".composer .stop")
        await page.fill("#chat-text", "a draft")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("[role=alert] >> text=answers still")
        await page.keyboard.press("Escape")
        await page.wait_for_selector(".composer .main:not(.stop)")
        await page.wait_for_selector("text=The first answer")
        assert not await page.is_visible("text=answers still")
        await page.click("text=Edit")
        await page.fill(".edit textarea", " ")
        await page.press(".edit textarea", "Enter")
        assert await page.is_visible(".edit textarea")
        await page.press(".edit textarea", "Escape")
        await page.reload()
        await page.wait_for_selector("text=The first answer")
        assert await page.input_value("#chat-text") == "a draft"
        await page.click("text=New chat")
        assert await page.locator("article").count() == 0
        await page.click("text=Back to the last chat")
        await page.wait_for_selector("text=The first answer")
        await page.click("nav >> text=Status")
        await page.wait_for_selector("#status .tiles dd")
        await page.go_back()
        await until(page, "!document.querySelector('#chat').hidden")


async def test_a_chat_that_is_too_long_to_keep_says_so_and_loses_nothing_before_it():
    engine = FakeEngine((TextDelta("x" * 2_000_000), Finished("stop", USAGE)))
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ready()
        for _ in range(3):
            await one.ask("more")
        await until(page, STORED, 3)
        await page.reload()
        await page.wait_for_selector("article.assistant >> nth=2")
        await page.uncheck("#chats-keep")
        await one.ask("more")
        await page.wait_for_selector("[role=alert] >> text=too long for the browser to keep")
        assert await page.locator("article.assistant").count() == 4
        await page.reload()
        await page.wait_for_selector("article.assistant >> nth=2")
        assert await page.locator("article.assistant").count() == 3


STORED = """count => new Promise((done) => {
    const asked = indexedDB.open("omlxd", 1);
    asked.onsuccess = () => {
        const all = asked.result.transaction("chats").objectStore("chats").getAll();
        all.onsuccess = () => done(all.result.some(({ chat }) =>
            chat.messages.filter((each) => each.role === "assistant" && each.usage).length === count));
    };
})"""
"""Whether the browser keeps a conversation with so many answers."""


async def test_who_gives_no_key_may_give_it_later():
    app = app_of(FakeEngine(), api_key=KEY)
    async with served(app) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("401",)
        page = await one.open()
        await page.wait_for_selector("dialog[open]")
        await page.keyboard.press("Escape")
        await page.click("text=Enter key")
        await one.give_key()
        await one.ready()
        assert await page.inner_text("#key-button") == "Forget key"


async def test_a_message_waits_for_the_images_that_are_still_read():
    engine, picture = FakeEngine(), png(4, 3)
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await page.wait_for_selector("text=+ Image")
        await page.evaluate("""() => {
            const real = FileReader.prototype.readAsDataURL;
            FileReader.prototype.readAsDataURL = function (file) {
                if (file.name === "gone.png") setTimeout(() => this.onerror());
                else globalThis.goOn = () => real.call(this, file);
            };
        }""")
        await transfer(one, "paste", picture)
        await until(page, "Boolean(globalThis.goOn)")
        await one.ask("What is it?", end=False)
        await page.keyboard.press("Enter")
        assert await page.locator("article").count() == 0 and not engine.requests
        await page.evaluate("goOn()")
        await page.wait_for_selector("article:last-child .figures .legend")
        sent = engine.requests[-1].prompt
        assert isinstance(sent, Conversation) and len(engine.requests) == 1
        assert [part.data for part in media_of(sent.messages) if isinstance(part, ImagePart)] == [picture]
        assert await page.locator("article.user .thumbs img").count() == 1
        await transfer(one, "paste", picture, "gone.png")
        await page.wait_for_selector("[role=alert] >> text=gone.png can't be read.")
        await one.ask("And without one?")
        assert len(engine.requests) == 2
