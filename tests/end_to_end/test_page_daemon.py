"""The page before a real daemon; long conversations and large caches; and what axe finds."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from browser import browser, needs_chromium, tab
from daemon import Daemon, demo_model, prose
from fake_engine import FakeEngine, app_of, served

from omlxd.config import load_settings
from omlxd.front.app import create_app
from omlxd.front.owner.cache.index import CacheIndex
from omlxd.kv.hashing import hash_blocks
from tests.end_to_end.test_page import until
from tests.front.owner.test_cache_tree import cached

pytestmark = [pytest.mark.slow, needs_chromium]

AXE = "axe-core@4.14.1"
MESSAGES, BLOCKS, BLOCK = 10_000, 25_000, 64
PIECE_BYTES = 250_000
"""More than an answer with a piece of the tree has, whatever the size of the cache."""
SHOWN = 60
"""Messages that are shown at once."""


async def test_models_and_cache_of_a_real_daemon(tmp_path: Path):
    with Daemon(tmp_path) as daemon:
        for word, seed in (("one", 3), ("two", 5)):
            daemon.chat(f"{prose(100)} {word} {prose(100, seed)}", max_tokens=4)
            daemon.settled()
        async with browser() as chromium, tab(chromium, daemon.url) as one:
            page = await one.open()
            await one.ready()
            await page.click("text=Options")
            await page.fill("#chat-max_tokens", "8")
            await one.ask(prose(60, 9))
            await page.click("nav >> text=Cache")
            await page.wait_for_selector(".sessions details >> nth=1")
            assert (await page.inner_text(".sessions summary b >> nth=0"))[:8] == prose(60, 9)[:8]
            await page.click(".sessions details >> nth=1 >> summary")
            await page.click("[aria-label^='Why was'] >> nth=1")
            await page.wait_for_selector(".sides mark")
            sides = [each.replace("\n", "") for each in await page.locator(".sides mark").all_inner_texts()]
            assert len(sides) == 2 and sides[0] != sides[1], sides
            assert sides[0].startswith("two") and sides[1].startswith("one"), sides
            daemon.settled()
            await sums(page)
            await page.click("text=Look again")
            await page.wait_for_selector(".tree-row >> nth=2")
            await sums(page)
            await page.click("[aria-label^='Show request'] >> nth=1")
            await until(page, "document.activeElement.getAttribute('role') === 'tree'")
            assert await page.locator(".tree-row.active").count() == 1
            await pin(page)
            before = await sums(page)
            await page.focus(".tree")
            await page.keyboard.press("Home")
            await page.click("text=Remove all of")
            await page.click("text=Yes, remove")
            await page.wait_for_selector("text=Gone from SSD")
            assert before > 0 and await sums(page, empty=True) == 0
            await page.click("nav >> text=Models")
            await page.click("button:has-text('Unload')")
            await page.wait_for_selector(".state:text('unloaded')")
            await page.click("[data-act^='load ']")
            await page.wait_for_selector(".state.ready")
            await page.click("[data-act^='pin '] >> visible=true")
            await page.wait_for_selector(".state:text('pinned')")
            one.expected = ("400",)
            await page.fill("#pull-name", "nonsense")
            await page.keyboard.press("Enter")
            await page.wait_for_selector(".pull [role=alert] >> text=is no hub id")


async def test_a_model_is_named_and_deleted_and_the_address_is_there_to_copy(tmp_path: Path):
    hub = tmp_path / "hub"
    fetched = hub / "models--org--fetched"
    shutil.copytree(demo_model(), fetched / "snapshots" / "1")
    (fetched / "refs").mkdir()
    (fetched / "refs" / "main").write_text("1")
    with Daemon(tmp_path, env={"HF_HUB_CACHE": str(hub)}) as daemon:
        async with browser() as chromium, tab(chromium, daemon.url) as one:
            await one.context.grant_permissions(["clipboard-read", "clipboard-write"])
            page = await one.open("connect")
            await page.click("[aria-label='Copy OpenAI']")
            assert await page.evaluate("navigator.clipboard.readText()") == f"{daemon.url}/v1"
            launched = await page.inner_text(".connect-row:has-text('Claude Code') code")
            assert launched == f"omlxd launch claude --url {daemon.url}"
            await page.click("nav >> text=Models")
            await page.wait_for_selector(".offered li")
            card = ".cards > li:has(b:text-is('org/fetched'))"
            await page.click(f"{card} >> summary:has-text('Settings')")
            await page.fill("[aria-label='Another name for org/fetched']", "mine")
            await page.click(f"{card} >> text=Add this name")
            await page.wait_for_selector(f"{card} >> text=also called mine")
            await settings_are_told_and_a_command_sets_them(page, daemon, card)
            await page.click("[aria-label='Load org/fetched']")
            await page.wait_for_selector(f"{card} >> .state.ready")
            await page.click("[aria-label='Delete org/fetched']")
            await page.click("text=Keep it")
            assert (fetched / "snapshots" / "1" / "config.json").exists()
            await page.click("[aria-label='Delete org/fetched']")
            for _ in range(2):  # The second look is asked after the first was drawn.
                async with page.expect_response("**/omlxd/models"):
                    pass
            await page.click("text=Yes, delete")
            await page.wait_for_selector(card, state="detached")
            assert not fetched.exists()
            names = await page.locator(".cards .name").all_inner_texts()
            assert daemon.model in names and "org/fetched" not in names
            one.expected = ("400",)
            await page.click(f"[aria-label='Delete {daemon.model}']")
            await page.click("text=Yes, delete")
            await page.wait_for_selector("[role=alert] >> text=a folder of your own; delete it there")
            assert (daemon.model_folder / "config.json").exists()


async def settings_are_told_and_a_command_sets_them(page: Any, daemon: Daemon, card: str) -> None:
    await page.wait_for_selector(f"{card} >> text=The file of settings says nothing of this model.")
    await page.fill("[aria-label='temperature of org/fetched']", "0.25")
    await page.fill("[aria-label='ttl of org/fetched']", "2h")
    await page.click("[aria-label='Copy the command that sets org/fetched']")
    command = await page.evaluate("navigator.clipboard.readText()")
    subprocess.run(["sh", "-c", command], check=True, timeout=60)
    base = daemon.home / "omlxd"
    file = base / "omlxd.toml"
    own = load_settings({"base_path": str(base)}, {}).models["org/fetched"]
    assert (own.temperature, own.ttl) == (0.25, 7200)
    daemon.process.send_signal(signal.SIGHUP)
    await page.click("h2:text('Get a model')")  # The list is drawn anew while nobody writes in it.
    for text in ("temperature = 0.25", "ttl = 7200.0", "'line 2'"):
        await page.wait_for_selector(f"{card} >> .said >> text={text}")
    await page.fill("[aria-label='temperature of org/fetched']", "0.5")
    await page.fill("[aria-label='ttl of org/fetched']", "")
    told = await page.inner_text(f"{card} pre")
    assert told == f'${{EDITOR:-nano}} {file}\n# under [models."org/fetched"]:\n# temperature = 0.5'
    await page.fill("[aria-label='temperature of org/fetched']", "")


async def pin(page: Any) -> None:
    await page.click(".sessions details >> nth=0 >> button:has-text('Pin')")
    await page.wait_for_selector(".pins li")
    focused = "document.activeElement.textContent"
    assert await page.evaluate(focused) == "Unpin", "who pressed the button stands on it still"
    await page.focus(".tree")
    await page.keyboard.press("Home")
    await page.click("text=Remove all of")
    await page.click("text=but for what is pinned")
    await page.wait_for_selector(".node .problem >> text=to remove the rest")
    assert "0 B" not in await page.inner_text(".pins li") and await sums(page) > 0
    await page.click(".pins button:has-text('Unpin')")
    await page.wait_for_selector("text=Nothing is pinned.")


async def test_a_folder_that_is_not_read_yet_is_no_empty_table(tmp_path: Path, monkeypatch: Any):
    goes_on, read = asyncio.Event(), CacheIndex._work

    async def slowly(index: CacheIndex) -> None:
        await goes_on.wait()
        await read(index)

    monkeypatch.setattr(CacheIndex, "_work", slowly)
    app = create_app(cached(tmp_path / "cache"))
    async with served(app) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("503",)  # These engines pin nothing.
        page = await one.open("cache")
        for _ in range(2):
            await page.wait_for_selector("#cache [role=status] >> text=Reading the folder")
            assert not await page.is_visible(".tree")
            await page.click("text=Look again")
        goes_on.set()
        assert await sums(page, empty=True) == 0


async def sums(page: Any, empty: bool = False) -> int:
    """Blocks that the tree has, once it was read; `empty`: once it has none."""
    for _ in range(300):
        count, _, rest = (await page.inner_text("#cache [role=status]")).partition(" ")
        if rest.startswith("blocks in") and rest.endswith("B.") and empty <= (count == "0"):
            return int(count.replace(",", ""))
        await asyncio.sleep(0.1)
    raise AssertionError("the tree was not read")


# --------------------------------------------------------------------------- size


async def test_ten_thousand_messages(capsys: pytest.CaptureFixture[str]):
    text = "Some **bold** text with `code`, and\n\n- a list\n- of two\n\n```python\nprint(1)\n```\n"
    turns = [{"role": ("user", "assistant")[at % 2], "content": f"{at}. {text}"} for at in range(MESSAGES)]
    chat = json.dumps({"session": "long", "messages": turns, "options": {}})
    async with served(app_of(FakeEngine())) as url, browser() as chromium, tab(chromium, url) as one:
        await one.context.add_init_script(f"sessionStorage.setItem('omlxd.chat', {json.dumps(chat)})")
        began = time.monotonic()
        page = await one.open()
        await page.wait_for_selector("article")
        loaded = time.monotonic() - began
        first = await page.evaluate(WATCHING)
        assert await page.locator("article").count() == SHOWN and first < 100 * SHOWN
        worst = await page.evaluate(TYPING)
        assert await page.evaluate("made") == 0, "a letter makes no message anew"
        began = time.monotonic()
        for _ in range(20):
            await page.click(".earlier")
        earlier = (time.monotonic() - began) / 20
        assert await page.locator("article").count() == 21 * SHOWN
        added = await page.evaluate("made")
        assert added < 1.1 * 20 * first, "earlier ones are made, and none anew"
        scrolled = await page.evaluate(SCROLLING, "#chat .scroll")
        began = time.monotonic()
        await one.ask("one more")
        answered = time.monotonic() - began
        assert await page.evaluate("made") - added < 1.1 * first, "an answer makes no other message anew"
        with capsys.disabled():
            print(
                f"\n{MESSAGES} messages: loaded in {loaded:.2f} s, a letter typed in {worst:.0f} ms, "
                f"60 earlier ones shown in {1000 * earlier:.0f} ms, longest frame of a scroll "
                f"{scrolled:.0f} ms, asked and answered in {answered:.2f} s"
            )


WATCHING = """() => {
    globalThis.made = 0;
    const box = document.querySelector("#chat .scroll");
    new MutationObserver((all) => {
        for (const node of all.flatMap((each) => [...each.addedNodes]))
            if (node.nodeType === 1) globalThis.made += 1 + node.querySelectorAll("*").length;
    }).observe(box, { childList: true, subtree: true });
    return box.querySelectorAll("*").length;
}"""
"""From now on `made` counts the elements that are made in the log; returns how many there are."""

TYPING = """async () => {
    const field = document.getElementById("chat-text");
    let worst = 0;
    for (const letter of "a quick brown fox") {
        const began = performance.now();
        field.focus();
        document.execCommand("insertText", false, letter);
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        worst = Math.max(worst, performance.now() - began);
    }
    field.value = "";
    return worst;
}"""
"""Milliseconds from a letter to the frame that shows it, the worst of some."""

SCROLLING = """async (name) => {
    const box = document.querySelector(name);
    let worst = 0;
    for (let at = 0; at < 60; at += 1) {
        const began = performance.now();
        box.scrollTop = (box.scrollHeight * ((at * 37) % 60)) / 60;
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        worst = Math.max(worst, performance.now() - began);
    }
    return worst;
}"""


def large_cache(root: Path) -> None:
    """`BLOCKS` files without payload, in 500 chains that branch off 5 others."""
    namespace = "ab" * 16
    (root / namespace).mkdir(parents=True)
    for fan in range(256):
        (root / namespace / f"{fan:02x}").mkdir()
    made = 0
    for trunk in range(5):
        parents = [(bytes(32), 0)]
        for branch in range(101):
            parent, start = parents[0] if branch == 0 else parents[-1]
            parents.append((parent, start))
            for block in range(50 if branch else 0):
                tokens = [(trunk * 1009 + branch * 31 + block * 7 + at) % 50_000 for at in range(BLOCK)]
                (name,) = hash_blocks(parent, tokens, BLOCK)
                head = {
                    "__metadata__": {
                        "digest": "0" * 32,
                        "format": "omlxd-kv-1",
                        "kind": "tokens",
                        "namespace": namespace,
                        "hash": name.hex(),
                        "parent": parent.hex(),
                        "tokens": ",".join(map(str, tokens)),
                    }
                }
                text = json.dumps(head, separators=(",", ":")).encode()
                path = f"{root}/{namespace}/{name.hex()[:2]}/{name.hex()}.safetensors"
                with open(path, "wb", buffering=0) as file:
                    file.write(len(text).to_bytes(8, "little") + text)
                made += 1
                parent = name
                if branch == 1 and block == 9:
                    parents[:] = [(parent, 0)] * 2
    assert made == BLOCKS


async def test_many_thousand_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """No look reads the folder for itself, and none of what it is answered with grows with the cache."""
    large_cache(tmp_path / "cache")
    app = create_app(cached(tmp_path / "cache"))
    async with served(app) as url, browser() as chromium, tab(chromium, url) as one:
        one.expected = ("503",)  # These engines pin nothing.
        sizes: list[int] = []

        async def note(response: Any) -> None:
            if "/omlxd/cache/tree" in response.url:
                sizes.append(len(await response.body()))

        one.page.on("response", note)
        began = time.monotonic()
        page = await one.open("cache")
        await page.wait_for_selector(".tree-row >> nth=5")
        loaded = time.monotonic() - began
        assert await sums(page) == BLOCKS
        read = len(sizes)
        began = time.monotonic()
        await page.reload()
        await page.wait_for_selector(".tree-row >> nth=5")
        again = time.monotonic() - began
        assert await sums(page) == BLOCKS
        rows = await page.locator(".tree-row").count()
        await page.focus(".tree")
        opened = await page.evaluate(OPENING)
        scrolled = await page.evaluate(SCROLLING, ".tree")
        await page.keyboard.press("End")
        await until(page, "document.querySelector('.tree-row.active') !== null")
        with capsys.disabled():
            print(
                f"\n{BLOCKS} blocks: the tree stands after {loaded:.2f} s, most of it the read, and "
                f"after {again:.2f} s once it was read ({await page.inner_text('#cache [role=status]')}), "
                f"{rows} rows are elements; 100 of them gone through in {opened:.0f} ms, longest frame of a "
                f"scroll {scrolled:.0f} ms; {read} answers of {max(sizes)} bytes at most"
            )
    assert rows < 60 and max(sizes) < PIECE_BYTES
    assert one.page is not None and app.state.cache_index.reads == 1, (
        "the second look is answered from memory"
    )


OPENING = """async () => {
    const tree = document.querySelector(".tree");
    const began = performance.now();
    tree.dispatchEvent(new KeyboardEvent("keydown", { key: "Home", bubbles: true }));
    for (let at = 0; at < 200; at += 1) {
        const key = at % 2 ? "ArrowDown" : "ArrowRight";
        tree.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    }
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - began;
}"""


# --------------------------------------------------------------------------- axe


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if not npm:
        pytest.skip("install npm: axe-core comes from there")
    done = subprocess.run([npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm has no {AXE} for us: {done.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(axe: str, scheme: str, tmp_path: Path):
    with Daemon(tmp_path) as daemon:
        daemon.chat(prose(200), max_tokens=4)
        options = {"color_scheme": scheme, "bypass_csp": False}
        async with browser() as chromium, tab(chromium, daemon.url, **options) as one:
            page = await one.open()
            await one.ready()
            await page.click("text=Options")
            await page.fill("#chat-max_tokens", "8")
            await one.ask("hello")
            await page.evaluate(axe)
            for view, ready in (
                ("Chat", ".figures .legend"),
                ("Status", ".tiles dd"),
                ("Cache", ".tree-row >> nth=0"),
                ("Models", ".offered li"),
                ("Connect", ".connect-row"),
            ):
                await page.click(f"nav >> text={view}")
                await page.wait_for_selector(ready)
                found = await page.evaluate("async () => (await axe.run()).violations")
                told = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
                assert told == [], f"{view}: {told}"
