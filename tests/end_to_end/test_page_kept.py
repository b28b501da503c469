"""What the page keeps of conversations; texts of any length in it; colours of code, and formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import KEY, browser, needs_chromium, tab
from fake_engine import USAGE, FakeEngine, app_of, served

from omlxd.chat import Finished, TextDelta
from tests.end_to_end.test_page import says, until

pytestmark = [pytest.mark.slow, needs_chromium]

TITLES = "all => all.map(e => e.textContent)"
PARAGRAPHS, MOST_AT_ONCE = 9_000, 1000


async def titles(page: Any) -> list[str]:
    return await page.eval_on_selector_all(".chat-open bdi", TITLES)


async def listed(page: Any, *expected: str) -> None:
    """Wait until these conversations are listed, in this order."""
    titles = "[...document.querySelectorAll('.chat-open bdi')].map(e => e.textContent)"
    await until(page, f"wanted => JSON.stringify({titles}) === JSON.stringify(wanted)", [*expected])


async def test_conversations_are_kept_found_renamed_deleted_and_carried(tmp_path: Path):
    async with (
        served(app_of(says("An answer of roses"))) as url,
        browser() as chromium,
        tab(chromium, url) as one,
    ):
        page = await one.open()
        await one.ready()
        await one.ask("the first question")
        await listed(page, "the first question")
        await page.click("text=New chat")
        await one.ask("the second one, of <b>tulips</b>")
        await listed(page, "the second one, of <b>tulips</b>", "the first question")
        other = await one.context.new_page()
        await other.goto(url)
        await listed(other, "the second one, of <b>tulips</b>", "the first question")
        await other.click("text=the first question")
        await other.wait_for_selector("article.assistant >> text=An answer of roses")
        await other.close()
        # Every word counts, of questions and answers.
        await page.fill("#chats-search", "ROSES tulips")
        await listed(page, "the second one, of <b>tulips</b>")
        await page.fill("#chats-search", "")
        await listed(page, "the second one, of <b>tulips</b>", "the first question")
        await page.hover("text=the first question")
        await page.click("[aria-label='Rename the first question']")
        await page.keyboard.type("Roses")
        await page.keyboard.press("Enter")
        await listed(page, "the second one, of <b>tulips</b>", "Roses")
        async with page.expect_download() as waiting:
            await page.click("text=Export all")
        file = tmp_path / "kept.json"
        await (await waiting.value).save_as(file)
        assert [each["title"] for each in json.loads(file.read_text())["conversations"]][1] == "Roses"
        await page.hover("text=Roses")
        await page.click("[aria-label='Delete Roses']")
        await page.click("text=Yes, delete")
        await listed(page, "the second one, of <b>tulips</b>")
        await take(page, file)
        await page.wait_for_selector("text=1 conversation imported, 1 skipped: here already")
        await listed(page, "the second one, of <b>tulips</b>", "Roses")
        await take(page, file)
        await page.wait_for_selector("text=0 conversations imported, 2 skipped")
        # Only a new turn changes a conversation's date.
        await page.click(".chat-open >> text=Roses")
        await page.wait_for_selector("article.user >> text=the first question")
        await page.click("text=Options")
        await page.fill("#chat-temperature", "0.5")
        await page.keyboard.press("Tab")
        await page.wait_for_timeout(500)  # It is written after 300 ms.
        await listed(page, "the second one, of <b>tulips</b>", "Roses")
        await one.ask("one more")
        await listed(page, "Roses", "the second one, of <b>tulips</b>")
        await page.uncheck("#chats-keep")
        await page.click("text=Delete all")
        await listed(page)
        await page.click("text=New chat")
        await one.ask("not kept")
        await page.reload()
        await page.wait_for_selector("text=not kept")
        assert await titles(page) == [] and not await page.is_checked("#chats-keep")


async def take(page: Any, file: Path) -> None:
    async with page.expect_file_chooser() as waiting:
        await page.click(".chats >> button:text-is('Import')")
    await (await waiting.value).set_files(file)


async def test_each_key_has_conversations_of_its_own():
    async with (
        served(app_of(FakeEngine(), api_key=KEY)) as url,
        browser() as chromium,
        tab(chromium, url) as one,
    ):
        one.expected = ("401",)
        page = await one.open()
        await one.give_key()
        await one.ready()
        await one.ask("a private word")
        await listed(page, "a private word")
        await page.click("text=Forget key")
        await page.wait_for_selector("dialog[open]")
        await listed(page)
        await page.keyboard.press("Escape")
        assert await page.locator("article").count() == 0
        await page.click("text=Enter key")
        await one.give_key()
        await listed(page, "a private word")


MESSAGES = [
    {"role": "user", "content": "<script>alert(1)</script>", "images": ["https://evil.example/a.png", 7]},
    {"role": "assistant", "content": "[x](javascript:alert(1))", "calls": [None, {"name": 3}], "usage": 1},
    {"role": "system", "content": "no"},
    {"role": "user", "content": 5},
    None,
]
TITLE = "<img src=x onerror=alert(1)>"
STRANGE = {"title": TITLE, "at": "never", "options": {"system": 1, "model": "<b>"}, "messages": MESSAGES}
HOSTILE = {"format": "omlxd-conversations-1", "conversations": [None, 7, STRANGE, {"messages": "none"}]}
FILES = [
    ("{", "no JSON"),
    ('{"format": 1}', "holds no conversations"),
    (json.dumps(HOSTILE), "1 conversation imported"),
]


async def test_a_strangers_file_is_text_alone(tmp_path: Path):
    async with served(app_of(FakeEngine())) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ready()
        for text, said in FILES:
            (tmp_path / "file.json").write_text(text)
            await take(page, tmp_path / "file.json")
            await page.wait_for_selector(f".chats [role=status] >> text={said}")
        await page.click(".chat-open")
        await page.wait_for_selector("article.user >> text=<script>alert(1)</script>")
        assert await page.locator("article").count() == 2
        assert await page.locator("article :is(script, img, a)").count() == 0


async def test_an_earlier_question_is_edited_and_what_followed_is_kept():
    engine = says("An answer")
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ready()
        for question in ("one", "two", "three"):
            await one.ask(question)
        await page.click("article.user >> nth=0 >> text=Edit")
        await page.fill(".edit textarea", "eins")
        engine.script = (TextDelta("Another"), Finished("stop", USAGE))
        await page.keyboard.press("Enter")
        await page.wait_for_selector("article.assistant >> text=Another")
        assert await page.locator("article").count() == 2
        assert await page.inner_text("article.user .said") == "eins"
        await listed(page, "eins", "one (before an edit)")
        await page.click("text=one (before an edit)")
        await page.wait_for_selector("article.user >> text=three")
        assert await page.locator("article").count() == 6
        await page.click("article.user >> nth=2 >> text=Edit")
        await page.fill(".edit textarea", "drei")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("article.user >> text=drei")
        assert len(await titles(page)) == 2, "an edit of the last question makes no second conversation"


# --------------------------------------------------------------------------- texts of any length

COUNTING = """() => {
    window.most = 0;
    window.all = 0;
    const seen = new MutationObserver((changes) => {
        const added = changes.filter((change) => change.target.closest?.(".said, .thoughts"))
            .reduce((sum, change) => sum + change.addedNodes.length, 0);
        window.most = Math.max(window.most, added);
        window.all += added;
    });
    seen.observe(document, { childList: true, subtree: true });
}"""
"""Counts what is added to answers in one turn of the page: whatever the length, the page lives in between."""

LONG = {
    "paragraphs": "".join(f"Paragraph **{at}** of all.\n\n" for at in range(PARAGRAPHS)),
    "lines": "\n".join(f"line {at}" for at in range(PARAGRAPHS)),
    "items": "\n".join(f"- item {at}" for at in range(PARAGRAPHS)),
    "rows": "| a | b |\n|---|---|\n" + "\n".join(f"| {at} | x |" for at in range(PARAGRAPHS)),
    "quotes": "\n".join(f"> said {at}" for at in range(PARAGRAPHS)),
    "code": "```python\n" + "\n".join(f"print({at})" for at in range(PARAGRAPHS)) + "\n```",
}


@pytest.mark.parametrize("kind", LONG)
async def test_a_text_of_any_length_is_shown_in_pieces(kind: str):
    text = LONG[kind]
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text, "model": "m"}]
    chat = json.dumps({"session": "page-long", "messages": turns, "options": {}})
    async with served(app_of(FakeEngine())) as url, browser() as chromium, tab(chromium, url) as one:
        await one.context.add_init_script(f"sessionStorage.setItem('omlxd.chat', {json.dumps(chat)})")
        await one.context.add_init_script(f"({COUNTING})()")
        page = await one.open()
        last = str(PARAGRAPHS - 1)
        end = f"document.querySelector('article.assistant .said')?.textContent.slice(-400).includes('{last}')"
        await until(page, end)
        said = await page.evaluate("document.querySelector('article.user .said').textContent")
        assert said == text, "a question is shown as it was written"
        shown = await page.evaluate("document.querySelector('article.assistant .said').textContent")
        assert all(f"{at}" in shown for at in (0, 1, 7777, PARAGRAPHS - 2))
        assert await page.evaluate("window.most") <= MOST_AT_ONCE


async def test_an_answer_that_grows_is_made_once():
    """Each paragraph of a stream is made a few times at most, whatever the length of the answer."""
    count = 400
    pieces = [TextDelta(f"Paragraph **{at}**.\n\n") for at in range(count)]
    engine = FakeEngine((*pieces, Finished("stop", USAGE)))
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        await one.context.add_init_script(f"({COUNTING})()")
        page = await one.open()
        await one.ready()
        await one.ask("go on")
        assert await page.locator(".markdown p").count() == count
        right = "all => all.every((e, at) => e.textContent === `Paragraph ${at}.`)"
        assert await page.eval_on_selector_all(".markdown p", right)
        assert await page.evaluate("window.all") <= 2 * count + 100


# --------------------------------------------------------------------------- colours and formulas

SHOWN = r"""```python
def f(x):  # <img src=x onerror=alert(1)>
    return "</code><script>alert(1)</script>" + str(1)
```

```nonsense
<b>not a language</b>
```

It costs $5 or $6, and $x^2 + y_1$ is \(a \le b\), but \(\href{javascript:alert(1)}{x}\) and
$\notacommand{x}$ stay.

\[
- \frac{1}{2}
\]

$$\text{</math><script>alert(1)</script>}$$
"""


async def test_colours_and_formulas_are_elements_and_never_markup():
    async with served(app_of(says(SHOWN))) as url, browser() as chromium, tab(chromium, url) as one:
        asked: list[str] = []
        one.page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        page = await one.open()
        await one.ready()
        assert not {"temml.min.js", "highlight.min.js"} & {*asked}, "they are loaded when needed"
        await one.ask("show me")
        await page.wait_for_selector(".code .c-keyword >> text=def")
        await page.wait_for_selector(".formula math")
        code = await page.inner_text(".code code >> nth=0")
        assert code == SHOWN.split("```")[1].removeprefix("python\n").rstrip("\n")
        await until(page, "document.querySelectorAll('.formula math').length === 4")
        assert await page.locator(".said :is(script, img, b, a)").count() == 0
        text = await page.inner_text(".said p")
        assert "It costs $5 or $6, and" in text and r"$\notacommand{x}$" in text
        assert await page.locator(".code >> nth=1 >> span[class^='c-']").count() == 0
