"""The page at `GET /`: who gets it, what may reach it, and what its files may not hold."""

import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from app_client import client
from fake_engine import FakeEngine, app_of

from omlxd.cli.launch import AGENTS
from omlxd.front.owner.page import HEADERS, POLICY, TYPES, WEB

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
LIBRARIES = {
    "highlight.min.js": "6e44aa04cd503b51f6dbdcd6727fdac2ab744ec4ab81d3f8c02bc290693fddd1",
    "temml.min.js": "21f185ac9b825d80b654d300404fb27f0fa9bd0f95657a811072570cdbc34414",
}
"""What tools/web_libraries.py fetched. The page's policy keeps it from markup and from other hosts."""
FILES = sorted(file for file in WEB.iterdir() if file.suffix in TYPES)
OWN = [file for file in FILES if file.name not in LIBRARIES]
SCRIPTS = [file for file in OWN if file.suffix == ".js"]
OWNED = ["/omlxd/status", "/omlxd/requests", "/omlxd/cache/pins", "/omlxd/cache/tree"]
ORDERS = ["/omlxd/memory", "/omlxd/cache/forget", "/omlxd/cache/clear", "/omlxd/cache/pin", "/omlxd/why-miss"]


async def test_a_browser_gets_the_page_and_others_what_they_always_got():
    async with client(app_of(FakeEngine())) as http:
        page = await http.get("/", headers=HTML)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"] == POLICY and "<!doctype html>" in page.text
        for accept in ("*/*", "application/json", "text/plain"):
            plain = await http.get("/", headers={"accept": accept})
            assert re.fullmatch(r"omlxd \S+\n", plain.text) and plain.headers["vary"] == "accept"
            head = await http.head("/", headers={"accept": accept})
            assert head.status_code == 200 and not head.content


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
async def test_every_file_is_served_once(file: Path):
    async with client(app_of(FakeEngine())) as http:
        answer = await http.get(f"/web/{file.name}")
        assert answer.content == file.read_bytes()
        assert all(answer.headers[name] == value for name, value in HEADERS.items())
        again = await http.get(f"/web/{file.name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content


async def test_no_other_file_is_served():
    async with client(app_of(FakeEngine())) as http:
        for name in ("", "none.js", "..%2fapp.py", "%2e%2e/owner/page.py", "web/../../app.py", "app.js%00"):
            answer = await http.get(f"/web/{name}")
            assert answer.status_code == 404 and answer.headers["content-type"] == "application/json"


async def test_a_key_is_needed_for_what_it_shows_and_not_for_itself():
    async with client(app_of(FakeEngine(), api_key="s3cret")) as http:
        assert (await http.get("/", headers=HTML)).status_code == 200
        assert (await http.get("/web/app.js")).status_code == 200
        for path in (*OWNED, "/v1/models"):
            assert (await http.get(path)).status_code == 401
            allowed = await http.get(path, headers={"authorization": "Bearer s3cret"})
            assert allowed.status_code in (200, 503)
        for path in ORDERS:
            assert (await http.post(path, json={})).status_code == 401


async def test_another_name_for_this_machine_gets_nothing():
    async with client(app_of(FakeEngine())) as http:
        for path in ("/", "/web/app.js", *OWNED):
            answer = await http.get(path, headers={"host": "evil.example", **HTML})
            assert answer.status_code == 400 and "Host" in answer.text


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_another_site_reads_and_orders_nothing(site: str):
    browser = {"origin": "http://localhost:3000", "sec-fetch-site": site}
    async with client(app_of(FakeEngine())) as http:
        for path in OWNED:
            assert (await http.get(path, headers={"sec-fetch-site": site})).status_code == 400
            own = await http.get(path, headers={"sec-fetch-site": "same-origin"})
            assert own.status_code in (200, 503)
        for path in ORDERS:
            assert (await http.post(path, json={}, headers=browser)).status_code == 400
        for path in ("/", "/web/app.js"):  # A link may lead here; a frame may not show it.
            answer = await http.get(path, headers=browser | HTML)
            assert answer.status_code == 200 and "frame-ancestors 'none'" in POLICY
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert not any(name.startswith("access-control") for name in answer.headers)
    async with client(app_of(FakeEngine(), cors_origins=("http://localhost:3000",))) as http:
        assert (await http.get(OWNED[0], headers=browser)).status_code == 200
        other = browser | {"origin": "https://evil.example"}
        assert (await http.get(OWNED[0], headers=other)).status_code == 400


async def test_orders_have_a_limit():
    async with client(app_of(FakeEngine(), max_body_bytes=100)) as http:
        for path in ORDERS:
            assert (await http.post(path, content=b" " * 101)).status_code == 413


# --------------------------------------------------------------------------- the files


def test_they_are_small_and_in_the_package():
    assert sum(file.stat().st_size for file in OWN) <= 200_000
    assert sum(file.stat().st_size for file in FILES) <= 500_000
    project = tomllib.loads((WEB.parents[2] / "pyproject.toml").read_text())
    assert "front/web/*" in project["tool"]["setuptools"]["package-data"]["omlxd"]


def test_the_libraries_are_as_fetched_and_loaded_only_when_needed():
    for name, digest in LIBRARIES.items():
        assert hashlib.sha256((WEB / name).read_bytes()).hexdigest() == digest
        assert name in (WEB / "LICENCES.txt").read_text()
    for file in OWN:
        for name in LIBRARIES:
            assert not re.search(rf'from "\./{name}|src="[^"]*{name}', file.read_text()), (
                "no page waits for it"
            )


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_nothing_comes_from_another_host(file: Path):
    text = file.read_text()
    found = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}", text))
    assert found <= {"http://www.w3.org"}, "a namespace is no address that is loaded"


def test_the_markup_has_no_code_and_no_style():
    for file in FILES:
        if file.suffix in (".html", ".svg"):
            text = file.read_text()
            assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", text)
            assert all(re.search(r'src="/web/[\w.]+"', tag) for tag in re.findall(r"<script[^>]*>", text))


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_no_text_becomes_markup_or_code(file: Path):
    text = file.read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextual"
    )
    assert not re.search(forbidden + r"|DOMParser|document\.cookie|localStorage|srcdoc", text)
    for name in re.findall(r'from "\./([\w.]+)"', text):
        assert (WEB / name).is_file()


def test_the_links_of_the_page_are_its_views():
    links = re.findall(r'href="#/(\w+)"', (WEB / "index.html").read_text())
    (views,) = re.findall(r"const VIEWS = \{ ([\w, ]+) \}", (WEB / "app.js").read_text())
    assert links == views.split(", ") and links


def test_the_page_offers_each_agent_that_launch_knows():
    agents = re.search(r"AGENTS = \[(.*)\];", (WEB / "connect.js").read_text())
    assert agents is not None and set(re.findall(r'", "([\w-]+)"\]', agents[1])) == set(AGENTS)
