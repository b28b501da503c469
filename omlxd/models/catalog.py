"""Lists the installed models: that of `--model`, those under `--model-dir`, imported ones, the hub's cache.

A client's model name is compared with this list and never joined to a path.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..common.files import read_small
from ..config import Settings, closest
from ..errors import AdapterError, ModelError
from .adapters import ADAPTER_FILES, check_adapter
from .config.json_files import BrokenJSON, read_json
from .footprint import ModelKind, kind_of, read_config
from .resolve import (
    DEFAULT_ID,
    DEMO_ID,
    IMPORTED,
    check_folder,
    imported_folder,
    is_gguf,
    is_local,
    local_folder,
    local_path,
    model_id,
    own_folder,
)

Source = Literal["folder", "model-dir", "hub", "demo"]

LOOK_HOLDS_S = 2.0
"""Seconds that a look at the folders holds."""


class InstalledModel(msgspec.Struct, frozen=True):
    """A model that could be loaded. `spec`: what `resolve_model` takes. `folder` None: not built or
    downloaded. `adapter`: folder of a LoRA adapter that it is loaded with; `base`: id of that adapter's
    model, "" without one in its folders.
    """

    id: str
    spec: str
    source: Source
    folder: Path | None
    adapter: Path | None = None
    base: str = ""

    def is_same(self, other: InstalledModel) -> bool:
        """Return whether `other` is loaded from the same folders, whatever its id."""
        return (self.spec, self.adapter) == (other.spec, other.adapter)


class Catalog:
    """The installed models, the default one first, as of the last look. `settings` may be replaced at any
    time.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._installed: dict[str, InstalledModel] = {}
        self._looked_at = float("-inf")

    @property
    def is_old(self) -> bool:
        """Whether the last look is `LOOK_HOLDS_S` old."""
        return time.monotonic() - self._looked_at >= LOOK_HOLDS_S

    def models(self) -> dict[str, InstalledModel]:
        """Return models by id. Reads no file, once there was a look."""
        if self._looked_at == float("-inf"):
            self.look()
        return self._installed

    def spec_of(self, name: str) -> str:
        """Return the spec (`resolve_model`) of the model with that id or last part of one; else `name`."""
        models = self.models().values()
        return next((m.spec for m in models if name in (m.id, m.id.rpartition("/")[2])), name)

    def unknown_names(self, others: Iterable[str] = ()) -> list[str]:
        """List names in the settings file that no model here has, a sentence each. `others`: further ids."""
        names = [name for id in (*self.models(), *others) for name in (id, id.rpartition("/")[2])]
        return [
            f'[models."{name}"] is the name of no model here{closest(name, names)}; it waits for one.'
            for name in self.settings.models
            if name not in names
        ]

    def parts(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield (setting, model, value, why that can't be loaded) of each `draft-model` and `adapter`.

        The reason is "" where none is known without the network. Blocks for as long as the folders do.
        """
        for model, own in self.settings.models.items():
            if own.draft_model and (own.speculation or self.settings.speculation) == "auto":
                spec, why = self.spec_of(own.draft_model), ""
                try:
                    if is_local(spec) and not is_gguf(spec):
                        check_folder(local_folder(spec, self.settings.base_path), draft=True)
                except ModelError as error:
                    why = error.message
                yield "draft-model", model, own.draft_model, why
            if own.adapter is not None:
                why = ""
                try:
                    check_adapter(own.adapter)
                except AdapterError as error:
                    why = error.message
                yield "adapter", model, str(own.adapter), why

    def look(self) -> None:
        """Read the folders, for as long as the disk takes."""
        settings, own = self.settings, self.settings.base_path / "models"
        default = default_model(settings)
        installed = itertools.chain(
            (default,) if default else (),
            in_folder(settings.model_dir) if settings.model_dir else (),
            (m for m in in_folder(own, "folder") if own_folder(m.id, settings.base_path)),
            () if settings.no_hf_cache else in_hub_cache(hub_cache_dir()),
        )
        result: dict[str, InstalledModel] = {}
        for model in installed:
            result.setdefault(model.id, model)
        for model in list(result.values()):
            for tuned in adapters_of(model, settings.base_path):
                result.setdefault(tuned.id, tuned)
        if settings is self.settings:  # They may have been replaced meanwhile.
            self._installed, self._looked_at = result, time.monotonic()


def default_model(settings: Settings) -> InstalledModel | None:
    """Return the model of `--model`; without it none if `--model-dir` is set, else a small one of ours."""
    spec = settings.model
    if settings.model_dir is not None:
        if not spec:
            return None
        for model in in_folder(settings.model_dir):
            if model.id == spec:
                return model
    if not spec and (fetched := own_folder(DEFAULT_ID, settings.base_path)):
        return InstalledModel(DEFAULT_ID, str(fetched), "folder", fetched)
    if spec in ("", DEMO_ID):
        built = settings.base_path / "models" / DEMO_ID
        return InstalledModel(DEMO_ID, DEMO_ID, "demo", built if looks_like_model(built) else None)
    if is_gguf(spec):
        folder = imported_folder(spec, settings.base_path)
        return InstalledModel(model_id(spec), spec, "folder", folder if looks_like_model(folder) else None)
    if is_local(spec):
        return InstalledModel(model_id(spec), spec, "folder", local_folder(spec, settings.base_path))
    return InstalledModel(spec, spec, "hub", hub_snapshot(hub_cache_dir(), spec))


def in_folder(root: Path, source: Source = "model-dir") -> Iterator[InstalledModel]:
    """List models at `root`/NAME and `root`/ORG/NAME, in order, without unreadable ones."""
    for folder in _folders(root):
        if looks_like_model(folder):
            yield InstalledModel(folder.name, str(folder), source, folder)
            continue
        for inner in _folders(folder):
            if looks_like_model(inner):
                yield InstalledModel(f"{folder.name}/{inner.name}", str(inner), source, inner)


def own_adapters(id: str, base_path: Path) -> Path:
    """Return the folder of `omlxd tune` for adapters of model `id`."""
    return base_path / "adapters" / id


def adapters_of(model: InstalledModel, base_path: Path) -> Iterator[InstalledModel]:
    """Yield adapters of `model` as models, `ID:NAME`: those in its folder, and its `own_adapters`."""
    for root in filter(None, (model.folder, own_adapters(model.id, base_path))):
        for folder in _folders(root):
            if all(os.path.isfile(folder / name) for name in ADAPTER_FILES):
                yield msgspec.structs.replace(
                    model, id=f"{model.id}:{folder.name}", adapter=folder, base=model.id
                )


def looks_like_model(folder: Path) -> bool:
    """Return whether a folder has a config and weights; the load checks that they are complete."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):  # A name with zeros is none.
        return False
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)


def files_state(spec: str, base_path: Path) -> tuple[int, ...]:
    """Return what changes with the files that `spec` (`resolve_model`) means; () while there are none."""
    if is_local(spec):
        place = local_path(spec) if is_gguf(spec) else local_folder(spec, base_path)
    else:
        place = hub_snapshot(hub_cache_dir(), spec)
    try:
        files = sorted(place.iterdir()) if place and place.is_dir() else [place] if place else []
        stats = [file.stat() for file in files if file.is_file()]
    except OSError:
        return ()
    return tuple(part for stat in stats for part in (stat.st_ino, stat.st_size, stat.st_mtime_ns))


class _Import(msgspec.Struct):
    """An import's record of a GGUF file."""

    file: str = ""
    license: str = ""
    organization: str = ""


class Description(msgspec.Struct, frozen=True):
    """Facts in a model's folder.

    origin    what it was imported from, by whom it is, and its license; "": not imported
    template  its chat template; None: it can't be read
    family    `model_type` of its config
    bits      of a quantised weight; 0: not quantised
    changed   seconds since 1970
    kind      what it does
    """

    origin: str = ""
    template: str | None = None
    family: str = ""
    bits: int = 0
    changed: float = 0.0
    kind: ModelKind = "chat"

    @property
    def tools(self) -> bool | None:
        """Whether the template reads a list of tools; None: unreadable."""
        return None if self.template is None else "tools" in self.template

    @property
    def thinking(self) -> bool:
        """Whether the template has words for thinking."""
        return any(word in (self.template or "") for word in _THINKING)


_THINKING = ("enable_thinking", "<think>", "reasoning_effort", "reasoning_content")


def describe(folder: Path) -> Description:
    """Read the description of the model in `folder`; what can't be read is left empty."""
    config = read_config(folder)
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else 0
    try:
        changed = (folder / "config.json").stat().st_mtime
    except OSError:
        changed = 0.0
    return Description(
        origin=_origin(folder),
        template=_template(folder),
        family=str(config.get("model_type") or ""),
        bits=bits if isinstance(bits, int) else 0,
        changed=changed,
        kind=kind_of(folder, config),
    )


def _origin(folder: Path) -> str:
    try:
        made = read_json(folder / IMPORTED, _Import)
    except (OSError, BrokenJSON):
        return ""
    facts = [fact for fact in (made.organization, made.license) if fact]
    return made.file + (f" ({', '.join(facts)})" if facts else "")


class _Templates(msgspec.Struct):
    chat_template: Any = ""


def _template(folder: Path) -> str | None:
    try:
        jinja = folder / "chat_template.jinja"
        if jinja.exists():
            return read_small(jinja).decode(errors="replace")
        config = read_json(folder / "tokenizer_config.json", _Templates)
        return str(config.chat_template)
    except (OSError, BrokenJSON):
        return None


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            # The entry's own is_dir raises for a link that leads nowhere.
            names = [e.name for e in entries if not e.name.startswith(".") and os.path.isdir(e)]
    except OSError:
        return []
    # Of bytes that are no UTF-8 Python makes what JSON can't hold.
    return [root / name for name in sorted(names) if name.encode(errors="ignore").decode() == name]


# --------------------------------------------------------------------------- the hub's own cache


def hub_cache_dir() -> Path:
    """Return the cache folder of the hub's client, by its own variables."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not cache:
        home = os.environ.get("HF_HOME")
        if not home:
            home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        cache = os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def hub_snapshot(cache: Path, repo: str) -> Path | None:
    """Return the folder of `repo` (ORG/NAME), the main branch when it was downloaded."""
    base = cache / ("models--" + repo.replace("/", "--"))
    try:
        revision = read_small(base / "refs" / "main").decode(errors="replace").strip()
    except OSError:
        return None
    folder = base / "snapshots" / revision
    return folder if revision and looks_like_model(folder) else None


def in_hub_cache(cache: Path) -> Iterator[InstalledModel]:
    """List language models in the hub's cache: those with weights, a config and a tokenizer."""
    for base in _folders(cache):
        kind, _, name = base.name.partition("--")
        org, _, name = name.partition("--")
        if kind != "models" or not org or not name:
            continue
        folder = hub_snapshot(cache, f"{org}/{name}")
        if folder is not None and any(
            os.path.exists(folder / f) for f in ("tokenizer.json", "tokenizer.model")
        ):
            yield InstalledModel(f"{org}/{name}", f"{org}/{name}", "hub", folder)
