"""What goes wrong around a chat in the page: refused, interrupted, stopped, long; and narrow windows."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from app_client import body
from browser import KEY, READY, browser, needs_chromium, tab
from fake_engine import USAGE, FakeEngine, FakeEngines, app_of, served

from omlxd.chat import Finished, Progress, TextDelta
from omlxd.errors import InvalidRequest
from omlxd.front.app import create_app
from tests.end_to_end.test_page import until

pytestmark = [pytest.mark.slow, needs_chromium]

WAITS = (Progress(48, 100), TextDelta("It"), TextDelta(" begins"), 600.0, Finished("stop", USAGE))
AT_END = """(() => { const box = document.querySelector("#chat .scroll");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 80; })()"""


async def test_the_answer_to_a_long_message_is_seen():
    async with (
        served(app_of(FakeEngine())) as url,
        browser() as chromium,
        tab(chromium, url, viewport={"width": 1200, "height": 800}) as one,
    ):
        page = await one.open()
        await one.ready()
        await one.ask("Short one.")
        for _ in range(2):
            await one.ask("\n".join(f"Line {at}" for at in range(60)))
            await until(page, AT_END)
        assert not await page.is_visible(".newest")
        await page.mouse.move(600, 300)
        await page.mouse.wheel(0, -900)
        await page.click("text=↓ Newest")
        await until(page, AT_END)
        assert not await page.is_visible(".newest")


async def test_what_is_refused_goes_back_into_its_field():
    engine = FakeEngine()
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("400",)
        page = await one.open()
        await one.ready()
        await page.click("text=Options")
        await page.fill("#chat-tools", "{oops")
        await one.ask("first", end=False)
        await page.wait_for_selector("[role=alert] >> text=no JSON")
        assert await page.input_value("#chat-text") == "first"
        assert await page.locator("article").count() == 0
        await page.fill("#chat-tools", "")
        await page.fill("#chat-temperature", "99")
        await one.ask("", end=False)
        await page.wait_for_selector("[role=alert] >> text=temperature")
        assert await page.input_value("#chat-text") == "first"
        await page.fill("#chat-temperature", "")
        engine.script = (InvalidRequest("It is too long."),)
        await one.ask("", end=False)
        await page.wait_for_selector("[role=alert] >> text=It is too long.")
        engine.script = (TextDelta("Yes"), Finished("stop", USAGE))
        await one.ask("")
        assert len(engine.requests[-1].prompt.messages) == 1  # type: ignore[union-attr]


async def test_a_double_click_sends_and_a_stopped_answer_has_its_figures():
    engine = FakeEngine(WAITS)
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("503",)  # These engines have no cache.
        page = await one.open()
        await one.ready()
        await page.fill("#chat-text", "wait\u202e for it")
        await page.dblclick(".composer .main")
        await page.wait_for_selector("text=It begins")
        assert await page.inner_text(".composer .main") == "Stop"
        await page.keyboard.press("Tab")
        await page.focus("#chat-text")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("[role=alert] >> text=answers still")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("text=48 restored")
        told = await page.inner_text(".legend")
        assert "TTFT" in told and "about 2 tokens" in told and "52 computed" in told
        await page.click("nav >> text=Cache")
        await page.wait_for_selector(".sessions summary bdi:text-is('wait for it')")
        assert "100\t48" in await page.inner_text(".sessions tbody tr")
        await page.click("text=Why?")
        await page.wait_for_selector(".why >> text=48 came from the cache")
        await page.click("nav >> text=Status")
        await page.wait_for_selector(".tiles div:has-text('last hour') dd:text-is('1')")


async def test_who_reloads_or_loses_the_daemon_reads_that_it_was_interrupted():
    engine = FakeEngine(WAITS)
    async with browser() as chromium:
        async with served(app_of(engine)) as url:
            context = await chromium.new_context()
            page = await context.new_page()
            await page.goto(url)
            await page.wait_for_selector(READY, state="attached")
            await page.fill("#chat-text", "wait")
            await page.keyboard.press("Enter")
            await page.wait_for_selector("text=It begins")
            await page.reload()
            await page.wait_for_selector("article .problem >> text=Interrupted")
            await page.wait_for_selector("text=Regenerate")
            await page.click("nav >> text=Status")
            await page.wait_for_selector("#status .tiles dd")
            assert await page.locator(".stale").count() == 0
        await page.wait_for_selector("#status.stale")
        await page.wait_for_selector("#status [role=alert] >> text=What stands below is of")
        await context.close()


async def test_an_open_edit_is_ended_before_another_message_goes():
    engine = FakeEngine()
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        page = await one.open()
        await one.ready()
        await one.ask("one")
        await page.click("text=Edit")
        assert await page.locator("text=Regenerate").count() == 0
        await one.ask("two", end=False)
        await page.wait_for_selector("[role=alert] >> text=is being edited")
        assert await page.input_value("#chat-text") == "two" and len(engine.requests) == 1
        await page.click("text=Cancel")
        await one.ask("")
        assert len(engine.requests) == 2


async def test_an_edit_that_is_refused_loses_no_answer():
    engine = FakeEngine((TextDelta("The first answer"), Finished("stop", USAGE)))
    async with served(app_of(engine)) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("400",)
        page = await one.open()
        await one.ready()
        await one.ask("one")
        engine.script = (InvalidRequest("It is too long."),)
        await page.click("text=Edit")
        await page.fill(".edit textarea", "two")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("[role=alert] >> text=It is too long.")
        assert await page.input_value(".edit textarea") == "two"
        await page.reload()
        await one.ready()
        assert await page.inner_text("article.user .said") == "one"
        assert "The first answer" in await page.inner_text("article.assistant")
        await page.click("text=Options")
        await page.fill("#chat-tools", "{oops")
        await page.click("text=Edit")
        await page.fill(".edit textarea", "three")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("[role=alert] >> text=no JSON")
        assert "The first answer" in await page.inner_text("article.assistant")
        await page.fill("#chat-tools", "")
        engine.script = (TextDelta("The second answer"), Finished("stop", USAGE))
        await page.focus(".edit textarea")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=The second answer")
        assert await page.inner_text("article.user .said") == "three"
        assert await page.locator("article").count() == 2


async def test_a_damaged_store_is_a_chat_all_the_same():
    for stored in (
        '{"messages":[null,5,{"role":"user","content":"kept"}],"options":3}',
        '{"messages":4}',
        "5",
    ):
        async with served(app_of(FakeEngine())) as url, browser() as chromium, tab(chromium, url) as one:
            once = "if (!sessionStorage.length) sessionStorage.setItem('omlxd.chat', "
            await one.context.add_init_script(f"{once}{json.dumps(stored)})")
            page = await one.open()
            await one.ready()
            await one.ask("hello")
            assert ("kept" in await page.inner_text(".log")) == ("kept" in stored)


async def test_a_key_that_is_forgotten_takes_the_conversation_along():
    app = app_of(FakeEngine(), api_key=KEY)
    async with served(app) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("401",)
        page = await one.open()
        await one.give_key()
        await one.ready()
        await one.ask("a private word")
        await page.click("text=Forget key")
        await page.wait_for_selector("dialog[open]")
        assert "private" not in await page.evaluate("JSON.stringify(sessionStorage)")
        assert await page.locator("article").count() == 0


async def test_names_of_strangers_stay_in_their_line():
    engine = FakeEngine()
    async with (
        served(create_app(FakeEngines(engine))) as url,
        browser() as chromium,
        tab(chromium, url, viewport={"width": 360, "height": 560}) as one,
    ):
        one.expected = ("503",)
        page = await one.open()
        asked = body("/v1/chat/completions") | {"user": "x"}
        asked["messages"] = [{"role": "user", "content": "a\u202eb\n" + "long " * 1000}]
        ask = """([path, asked]) => fetch(path, { method: "POST", body: JSON.stringify(asked),
            headers: { "content-type": "application/json", "x-session-affinity": "n".repeat(5000) } })
            .then((answer) => answer.text())"""
        await page.evaluate(ask, ["/v1/chat/completions", asked])
        await page.click("nav >> text=Cache")
        await page.wait_for_selector(".sessions summary b")
        name = await page.inner_text(".sessions summary b")
        assert name.startswith("a b long") and len(name) <= 80
        await page.wait_for_selector("text=There is no SSD cache")
        sideways = (
            "document.querySelector('#cache').scrollWidth <= document.querySelector('#cache').clientWidth"
        )
        assert await page.evaluate(sideways)


async def test_clients_without_a_session_are_entries_of_their_own():
    """One for each client and beginning; the session's name is short there, and whole in the opened row."""
    session = "chat-" + "0123456789" * 4
    async with (
        served(create_app(FakeEngines(FakeEngine()))) as url,
        browser() as chromium,
        tab(chromium, url, viewport={"width": 390, "height": 700}) as one,
        httpx.AsyncClient(base_url=url) as http,
    ):
        one.expected = ("503",)
        for agent, words, more in (
            ("omlxd-cache/0.1.0", "You are a helpful clerk.", {}),
            ("curl/8", "What is two?", {}),
            ("foo/1", "What is three?", {}),
            ("foo/1", "What is three?", {}),
            ("foo/1", "Named", {"prompt_cache_key": session}),
        ):
            asked = body("/v1/chat/completions") | {"messages": [{"role": "user", "content": words}]} | more
            (
                await http.post("/v1/chat/completions", json=asked, headers={"user-agent": agent})
            ).raise_for_status()
        page = await one.open("cache")
        await page.wait_for_selector(".sessions summary >> nth=3")
        told = [" ".join(each.split()) for each in await page.locator(".sessions summary").all_inner_texts()]
        begins = [each.partition(" turn")[0] for each in told]
        assert begins == [
            "foo Named 1",
            "foo What is three? 1",
            "curl What is two? 1",
            "omlxd cache You are a helpful clerk. 1",
        ]
        assert [re.search(r"(\d+) request", each)[1] for each in told] == ["1", "2", "1", "1"]
        assert session not in told[0] and session[:17] + "…" in told[0]
        assert session in await page.inner_text(".sessions details >> nth=0 >> p.hint")


async def test_the_bars_of_a_phone_hold_all_their_buttons():
    async with (
        served(app_of(FakeEngine(), api_key=KEY)) as url,
        browser() as chromium,
        tab(chromium, url, viewport={"width": 390, "height": 700}) as one,
    ):
        one.expected = ("401",)
        page = await one.open()
        await one.give_key()
        await one.ready()
        key = await page.locator("#key-button").bounding_box()
        for name in await page.locator("nav a").all():
            box = await name.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, box
            assert box["y"] >= key["y"] + key["height"] - 1 or box["x"] + box["width"] <= key["x"], box
        options = await page.locator(".bar >> text=Options").bounding_box()
        new = await page.locator(".bar >> text=New chat").bounding_box()
        assert options["y"] == new["y"]
        await page.click("text=Chats")
        head, aside = await page.locator(".top").bounding_box(), await page.locator("#chats").bounding_box()
        assert aside["y"] >= head["y"] + head["height"] - 1


@pytest.mark.parametrize("size", [(360, 560), (360, 740), (1000, 450), (1200, 800)])
async def test_everything_is_in_the_window(size: tuple[int, int]):
    width, height = size
    engine = FakeEngine()
    async with (
        served(app_of(engine)) as url,
        browser() as chromium,
        tab(chromium, url, viewport={"width": width, "height": height}) as one,
    ):
        one.expected = ("503",)  # These engines pin nothing.
        page = await one.open()
        await one.ready()
        await one.ask("hello " * 80)
        await page.click("text=Options")
        for name in ("#chat-text", ".composer .main", "nav >> text=Models"):
            box = await page.locator(name).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, (name, box)
            assert box["y"] + box["height"] <= height, (name, box)
        nav = "document.querySelector('nav')"
        assert await page.evaluate(f"{nav}.scrollWidth <= {nav}.clientWidth")
        log = await page.locator("#chat .scroll").bounding_box()
        assert log["height"] >= 80, log
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await page.click("nav >> text=Cache")
        await page.wait_for_selector("#cache td button")
        wide = "all => all.every(each => each.scrollWidth <= each.clientWidth)"
        assert await page.eval_on_selector_all("#cache, #cache .wide", wide), "a table is cut"


async def test_views_find_the_daemon_that_is_back():
    async with browser() as chromium:
        async with served(app_of(FakeEngine())) as url:
            page = await (await chromium.new_context()).new_page()
            await page.goto(url)
            await page.wait_for_selector(READY, state="attached")
            await page.fill("#chat-text", "hello")
            await page.keyboard.press("Enter")
            await page.wait_for_selector(".figures .legend")
            await page.click("nav >> text=Cache")
            await page.wait_for_selector(".sessions tbody tr")
        port = int(url.rpartition(":")[2])
        async with served(app_of(FakeEngine()), port):
            await page.click("text=Why?")
            await page.wait_for_selector("#cache [role=alert] >> text=no request is kept")
            await page.wait_for_selector("#cache >> text=No request has been made since")
        await page.click("text=Look again")
        await page.wait_for_selector("#cache [role=alert] >> text=does not answer")
        async with served(app_of(FakeEngine()), port):
            await page.wait_for_selector("#cache [role=alert]", state="hidden")
            await page.route("**/omlxd/models", lambda route: route.abort())
            await page.click("nav >> text=Models")
            await page.wait_for_selector("#models [role=alert] >> text=does not answer")
            await page.unroute("**/omlxd/models")
            await page.route("**/omlxd/models", lambda route: route.fulfill(json={"models": []}))
            await page.wait_for_selector("#models > [role=alert]", state="hidden")
            await page.fill("#pull-name", " ")
            await page.click(".pull button")
            await page.wait_for_selector(".pull [role=alert] >> text=Write the name of a model first")


async def test_a_look_that_fails_after_its_view_was_left_is_the_last_one():
    async with served(app_of(FakeEngine())) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("ERR_FAILED",)
        held: list[Any] = []
        page = await one.open()
        await one.ready()
        await page.clock.install()
        await page.route("**/omlxd/requests", lambda route: held.append(route))
        async with page.expect_request("**/omlxd/requests"):
            await page.click("nav >> text=Cache")
        await page.click("nav >> text=Chat")
        await held[0].abort()
        await page.wait_for_selector("#cache [role=alert]:not([hidden])", state="attached")
        await page.clock.run_for(20_000)
        assert len(held) == 1
        await page.click("nav >> text=Cache")
        await until(page, "!document.querySelector('#cache').hidden")
        async with asyncio.timeout(240):
            while len(held) < 2:
                await asyncio.sleep(0.05)
        await held[1].abort()
        async with page.expect_request("**/omlxd/requests"):
            await page.clock.run_for(4_000)
