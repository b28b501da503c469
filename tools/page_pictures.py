"""Pictures of the page for the README: a conversation, and the status behind it.

    python tools/page_pictures.py --base-path ~/.omlxd --minutes 4

Starts a daemon of its own with SmolLM2-135M-Instruct, talks to it in Chromium as a user does, has its model
loaded anew once, so that the SSD has a part, and writes chat.png and status.png. Needs playwright.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from daemon_process import REPO, end_daemon, start_daemon
from playwright.sync_api import Page, sync_playwright

OUT = REPO / "tools" / "pictures"
SYSTEM = (
    "You are a guide to the cities of Europe. You answer in one or two plain sentences, and you know rivers, "
    "bridges, museums, markets, parks, trains and the food of each place. "
) * 8
QUESTIONS = ("What is the capital of France?", "Which river runs through it?", "Name three of its museums.")
MOST_BYTES = 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-path", default="~/.omlxd", help="where the model is")
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="how long others ask, for the charts; 0: chat alone"
    )
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="omlxd-pictures-") as home:
        flags = ["--port", "0", "--base-path", str(Path(args.base_path).expanduser())]
        flags += ["--model", "SmolLM2-135M-Instruct", "--paged-ssd-cache-dir", f"{home}/cache"]
        flags += ["--paged-ssd-cache-max-size", "2GB", "--hot-cache-max-size", "300MB"]
        daemon, url = start_daemon(Path(home) / "log.txt", *flags, OMLXD_CPU_BLAS="auto")
        try:
            with sync_playwright() as playwright:
                take(playwright, url, args.minutes * 60)
        finally:
            daemon.terminate()
            daemon.wait(60)
            end_daemon(daemon)


def take(playwright, url: str, seconds: float) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    options = {"max_tokens": "60", "temperature": "0", "system": SYSTEM}
    script = f"sessionStorage.setItem('omlxd.chat', JSON.stringify({json.dumps({'options': options})}))"
    # Before the page's own code: what is set in an open page, it overwrites as it is left.
    chat = browser.new_page(viewport={"width": 1000, "height": 620}, color_scheme="light")
    chat.set_default_timeout(300_000)
    chat.add_init_script(script)
    chat.goto(url)
    chat.wait_for_selector("#chat-model option", state="attached")
    for number, question in enumerate(QUESTIONS):
        if number == len(QUESTIONS) - 1:
            load_anew(url)
        chat.fill("#chat-text", question)
        chat.keyboard.press("Enter")
        chat.wait_for_selector(f"article >> nth={2 * number + 1} >> .legend")
    picture(chat, "chat")
    if not seconds:
        return
    status = browser.new_page(viewport={"width": 1000, "height": 760}, color_scheme="dark")
    status.goto(f"{url}/#/status")
    stop = threading.Event()
    others = [threading.Thread(target=ask, args=(url, first, stop)) for first in range(2)]
    for other in others:
        other.start()
    time.sleep(seconds)
    picture(status, "status")
    stop.set()
    for other in others:
        other.join()
    browser.close()


def load_anew(url: str) -> None:
    """So that what is in RAM comes from SSD afterwards."""
    time.sleep(5)  # The newest blocks are written meanwhile.
    for verb in ("unload", "load"):
        post(f"{url}/omlxd/models/{verb}", {"model": "SmolLM2-135M-Instruct"})


def ask(url: str, first: int, stop: threading.Event) -> None:
    """Conversations that grow for some turns."""
    for number in itertools.count(first, 2):
        turns = [{"role": "user", "content": f"{SYSTEM} Tell me of bridge {number}."}]
        for _ in range(5):
            if stop.is_set():
                return
            answer = post(f"{url}/v1/chat/completions", {"messages": turns, "max_tokens": 48})
            turns += [answer["choices"][0]["message"], {"role": "user", "content": "And what is beside it?"}]


def post(url: str, body: object) -> dict:
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as answer:
        return json.load(answer)


def picture(page: Page, name: str) -> None:
    file = OUT / f"{name}.png"
    page.screenshot(path=file)
    size = file.stat().st_size
    print(f"{file.relative_to(REPO)}: {size} bytes", "" if size < MOST_BYTES else "TOO LARGE", flush=True)


if __name__ == "__main__":
    main()
