"""--model: folders that are whole or not, the hub (a fake one, on loopback), the demo model."""

import hashlib
import json
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlx_lm.utils import load_config
from msgspec.structs import replace

from omlxd.config import load_settings
from omlxd.errors import ModelError
from omlxd.models import resolve
from omlxd.models.catalog import Catalog, default_model, hub_cache_dir, hub_snapshot
from omlxd.models.footprint import footprint
from omlxd.models.resolve import DEFAULT_ID, DEMO_ID, check_folder, fetch_from_hub, model_id, resolve_model

REPO = str(Path(__file__).resolve().parents[2])


def safetensors(nbytes: int = 16) -> bytes:
    header = json.dumps(
        {"__metadata__": {"a": "b"}, "w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
    )
    return struct.pack("<Q", len(header)) + header.encode() + bytes(nbytes)


def make(folder: Path) -> Path:
    """A whole model of two weight files, none of whose weights mean anything."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    shards = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    for name in shards.values():
        (folder / name).write_bytes(safetensors())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def test_a_whole_folder_passes(tmp_path: Path):
    check_folder(make(tmp_path / "m"))


def test_a_folder_with_one_weight_file_and_no_index_passes(tmp_path: Path):
    folder = make(tmp_path / "m")
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "model.safetensors").write_bytes(safetensors())
    check_folder(folder)


def test_a_config_with_infinity_passes(tmp_path: Path):
    """It is no JSON; transformers and mlx-lm write it, for Mamba 2's `time_step_limit`, and read it."""
    config = {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")], "hidden_size": 64}
    (make(tmp_path / "m") / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path / "m")["time_step_limit"][1] == float("inf")
    check_folder(tmp_path / "m")
    assert footprint(tmp_path / "m").hidden_size == 64


@pytest.mark.parametrize("name", ["._model.safetensors", "._model-00001-of-00002.safetensors"])
def test_what_macos_keeps_beside_a_file_is_no_weights(name: str, tmp_path: Path):
    """On a disk that holds no extended attributes, as exFAT."""
    folder = make(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    before = footprint(folder)
    (folder / name).write_bytes(b"\x00\x05\x16\x07" + bytes(4092))
    check_folder(folder)
    assert footprint(folder) == before


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "no JSON object"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"a":' + "[" * 10**5), "no index"),
        (lambda f: (f / "config.json").write_text("[1]"), "no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "model_type"),
        (lambda f: (f / "config.json").write_text('{"model_type": "\\ud800"}'), "no JSON object"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: [p.unlink() for p in f.glob("model*")], "no weights"),
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "1 of 2 weight files are missing"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no index"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(safetensors()[:-1]), "truncated"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b""), "truncated"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 64), "truncated"),
        (
            lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(
                struct.pack("<Q", 8) + b"notjson!"
            ),
            "no safetensors",
        ),
        (
            lambda f: (f / "model-00001-of-00002.safetensors").write_text(
                "version https://git-lfs.github.com/spec/v1\n"
            ),
            "git-lfs",
        ),
    ],
)
def test_what_is_missing_is_named(harm, words: str, tmp_path: Path):
    folder = make(tmp_path / "m")
    harm(folder)
    with pytest.raises(ModelError) as caught:
        check_folder(folder)
    assert words in caught.value.message and str(folder) in caught.value.message


def test_a_path_that_is_no_folder(tmp_path: Path):
    with pytest.raises(ModelError, match="there is no folder"):
        check_folder(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        check_folder(tmp_path / "file")


async def test_a_path_that_cannot_be_looked_at(tmp_path: Path):
    """As one in another user's folder."""
    path = str(tmp_path / ("x" * 300))
    assert default_model(load_settings({"base_path": str(tmp_path), "model": path}, {}))
    with pytest.raises(ModelError, match=r"there is no folder|x can't be read: "):
        await resolve_model(path, tmp_path)
    assert default_model(load_settings({"base_path": str(tmp_path), "model": "~nobody-here/x"}, {}))
    with pytest.raises(ModelError, match="there is no folder"):
        await resolve_model("~nobody-here/x", tmp_path)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert model_id("") == DEMO_ID
    assert model_id("mlx-community/Qwen3-8B-4bit") == "mlx-community/Qwen3-8B-4bit"
    assert model_id(str(tmp_path / "my-model") + "/") == "my-model"
    make(tmp_path / "org" / "name")
    assert model_id("org/name") == "name"  # What exists here is meant, not the hub.
    assert (
        resolve.is_local("./x/y")
        and resolve.is_local("~/x")
        and resolve.is_local("/x/y")
        and resolve.is_local("x")
    )


async def test_a_local_folder_resolves_to_itself(tmp_path: Path):
    folder = make(tmp_path / "m")
    assert await resolve_model(str(folder), tmp_path) == folder
    with pytest.raises(ModelError, match="there is no folder"):
        await resolve_model("./not/there/at-all", tmp_path)


async def test_imported_models_are_known_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    imported, fetched = make(base / "models" / "tiny.Q4_0"), make(base / "models" / DEFAULT_ID)
    make(base / "models" / DEMO_ID)
    make(base / "models" / ".half.importing")
    assert await resolve_model("tiny.Q4_0", base) == imported
    settings = load_settings({"base_path": str(base)}, {})
    for spec, folder in (("", fetched), ("tiny.Q4_0", imported), (DEFAULT_ID, fetched)):
        default = default_model(replace(settings, model=spec))
        assert default is not None and (default.id, default.folder) == (folder.name, folder)
    assert list(Catalog(settings).models()) == [DEFAULT_ID, "tiny.Q4_0"]
    here = make(tmp_path / "tiny.Q4_0")
    assert await resolve_model("tiny.Q4_0", base) == here  # What exists here is meant.
    for name in (f"../models/{DEFAULT_ID}", "..", "", DEMO_ID):
        assert resolve.own_folder(name, base) is None
    with pytest.raises(ModelError, match=f"omlxd models pull {DEFAULT_ID}"):
        await resolve_model(DEFAULT_ID, tmp_path / "empty")


async def test_a_builder_that_fails_gives_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "broken.py").write_text("import sys\nprint('noise')\nprint('the reason')\nsys.exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"^the reason$"):
        await resolve._run_builder("broken", "x")
    with pytest.raises(ModelError, match="status 1"):
        await resolve._run_builder("no_such_module", "x")
    (tmp_path / "killed.py").write_text(
        'import os\nprint(\'{"done": 1, "total": 2}\', flush=True)\nos.abort()\n'
    )
    with pytest.raises(ModelError, match="status -6"):
        await resolve._run_builder("killed", note=lambda done, total: None)


async def test_the_demo_model_is_built_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", REPO)
    folder = await resolve_model("", tmp_path)
    assert folder == tmp_path / "models" / DEMO_ID
    check_folder(folder)
    assert await resolve_model("", tmp_path) == folder


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a snapshot download asks for."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012
    sha = "0" * 40
    lost = ""
    """The file that can't be fetched."""
    sizes: dict[str, int] = {}  # noqa: RUF012
    """Of files that it has in name alone."""
    copies: list[str] = []  # noqa: RUF012
    gated = False

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        prefix = f"/org/tiny/resolve/{self.sha}/"
        if path.startswith("/api/models/org/tiny/tree/"):
            rows = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in self.files.items()
            ]
            return self.send(200, json.dumps(rows).encode(), body)
        if path.startswith("/api/models/org/tiny"):
            held = {name: len(data) for name, data in self.files.items()}
            siblings = [{"rfilename": name, "size": size} for name, size in (held | self.sizes).items()]
            info = {
                "id": "org/tiny",
                "sha": self.sha,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            return self.send(200, json.dumps(info).encode(), body)
        if path == "/api/models":
            return self.send(200, json.dumps([{"id": name} for name in self.copies]).encode(), body)
        if self.gated and path.startswith(prefix):
            return self.send(403, b"", body, {"X-Error-Code": "GatedRepo"})
        if path.startswith(prefix) and path.removeprefix(prefix) in self.files.keys() - {self.lost}:
            return self.send(200, self.files[path.removeprefix(prefix)], body)
        self.send(404, b"", body, {"X-Error-Code": "RepoNotFound"})

    def send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.sha)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    folder = make(tmp_path / "on-the-hub")
    Hub.files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"code.py": b"raise SystemExit"}
    Hub.asked, Hub.sizes, Hub.copies, Hub.gated = [], {}, [], False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", REPO)
    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    yield Hub
    server.shutdown()
    server.server_close()


async def test_a_hub_id_is_downloaded_without_code(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = await resolve_model("org/tiny", tmp_path)
    assert folder.is_relative_to(tmp_path / "hf")
    assert {path.name for path in folder.iterdir()} == set(hub.files) - {"code.py"}
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert await resolve_model("org/tiny", tmp_path) == folder  # Once here, no network is needed.
    assert hub.asked == []


async def test_weights_in_a_layout_that_nobody_loads_are_not_downloaded(hub: type[Hub], tmp_path: Path):
    """Mistral's and gpt-oss's repositories hold their weights twice."""
    twice = {"consolidated.safetensors": b"x" * 99, "original/model.safetensors": b"x" * 99}
    hub.files |= twice
    await resolve_model("org/tiny", tmp_path)
    assert not [path for path in hub.asked if path.endswith(tuple(twice))]


async def test_an_update_that_broke_off_leaves_the_model_that_was_there(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = await resolve_model("org/tiny", tmp_path)
    monkeypatch.setattr(hub, "sha", "1" * 40)
    hub.files |= {"chat_template.jinja": b"new", "lost.safetensors": b"new"}
    monkeypatch.setattr(hub, "lost", "lost.safetensors")
    with pytest.raises(ModelError):
        await resolve_model("org/tiny", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert await resolve_model("org/tiny", tmp_path) == folder
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "lost", "")
    assert (await resolve_model("org/tiny", tmp_path)).name == hub.sha
    assert hub_snapshot(hub_cache_dir(), "org/tiny") == folder.with_name(hub.sha)


async def test_a_cache_whose_revision_cant_be_named_gives_its_model_all_the_same(
    hub: type[Hub], tmp_path: Path
):
    """It may be read-only; as root nothing is, so a file stands in the folder's place."""
    refs = hub_cache_dir() / "models--org--tiny" / "refs"
    refs.parent.mkdir(parents=True)
    refs.write_text("")
    assert (await resolve_model("org/tiny", tmp_path)).name == hub.sha


async def test_a_download_says_how_far_it_is(hub: type[Hub], tmp_path: Path):
    far: list[tuple[int, int]] = []
    folder = await fetch_from_hub("org/tiny", lambda done, total: far.append((done, total)))
    assert {path.name for path in folder.iterdir()} == set(hub.files) - {"code.py"}
    size = sum(len(data) for name, data in hub.files.items() if name != "code.py")
    assert far and all(0 <= done <= total <= size for done, total in far)
    assert far[-1][0] > 0, "a line is left out where another was written just before"


async def test_an_unknown_hub_id_is_told(hub: type[Hub], tmp_path: Path):
    with pytest.raises(ModelError, match="the hub has no model org/none"):
        await resolve_model("org/none", tmp_path)


async def test_a_hub_that_is_not_reached_is_told_as_that(hub: type[Hub], tmp_path: Path, monkeypatch):
    for name, value, remedy in (
        ("HF_ENDPOINT", "http://127.0.0.1:9", "; check the network."),
        ("TRANSFORMERS_OFFLINE", "1", ", as TRANSFORMERS_OFFLINE is set; unset it."),
        ("HF_HUB_OFFLINE", "1", ", as HF_HUB_OFFLINE is set; unset it."),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(ModelError) as caught:
            await resolve_model("org/tiny", tmp_path)
        assert caught.value.message == f"org/tiny can't be downloaded: the hub can't be reached{remedy}"


def test_resolving_imports_nothing_heavy():
    import subprocess

    code = (
        "import sys, omlxd.models.resolve; assert not {'numpy', 'huggingface_hub', 'mlx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)
