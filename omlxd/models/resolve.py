"""Resolves `--model` to a folder that can be loaded: a path, a name of ours, a hub id, the demo model.

The front calls this, so nothing heavy is imported: hub.py and demo.py run as programs of their own, and a
local folder is checked by a few kilobytes, weights by their headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..common.files import SMALL, check_small, read_small, safetensors_header
from ..errors import ModelError
from .config.drafters import drafter_kind
from .config.json_files import BrokenJSON, decode_json, read_json

DEFAULT_ID = "SmolLM2-135M-Instruct"
"""Id of the default model, once it was fetched (models/fetch/smollm.py)."""
DEMO_ID = "omlxd-demo"
"""Id of the model of random weights; the default one where no other is."""
NETWORK_S = 60
"""Seconds after which a network that was away may be back; clients give up at once above 60."""
IMPORTED = "omlxd_import.json"
"""File that names an imported folder's source."""

_NAME = re.compile(r"\w[\w.-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("*.tiktoken",))
_READ_AT_ONCE = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_LARGE = ("added_tokens", "merges", "tekken", "tokenizer", "vocab")
_MAX_TOKENIZER = 256 << 20
"""Bytes; the largest tokenizer.json of today has 35 MB."""


def model_id(spec: str) -> str:
    """Return the name under which clients find the model that `--model spec` serves."""
    if not spec:
        return DEMO_ID
    if is_gguf(spec):
        return re.sub(r"-\d{5}-of-\d{5}$", "", Path(spec).stem)
    return local_path(spec).name if is_local(spec) else spec


def is_local(spec: str) -> bool:
    """Return whether `spec` means a folder. An existing path, or text like one, is never a hub id."""
    return os.path.exists(local_path(spec)) or not is_hub_id(spec)


def local_path(spec: str) -> Path:
    """Return the absolute path that `spec` means. `~name` of an unknown user is an ordinary name."""
    return Path(os.path.expanduser(spec)).absolute()


def is_hub_id(spec: str) -> bool:
    """Return whether `spec` reads as ORG/NAME."""
    return bool(_HUB_ID.fullmatch(spec))


def no_hub_id(spec: str, near: str = "") -> str:
    """Say that `spec` can't be downloaded. `near`: which name was meant."""
    return f"{spec[:200]!r} is no hub id{near}: write ORG/NAME, or {DEFAULT_ID}."


def is_gguf(spec: str) -> bool:
    """Return whether `spec` means a GGUF file, which is imported before it is served."""
    return spec.lower().endswith(".gguf")


async def resolve_model(spec: str, base_path: Path, *, draft: bool = False) -> Path:
    """Return the folder of `--model spec`, built or downloaded if need be. Raises ModelError.

    draft  of a `draft-model`
    """
    if spec in ("", DEMO_ID):
        return await _run_builder("omlxd.models.demo", str(base_path / "models" / DEMO_ID))
    if not is_local(spec):
        return await fetch_from_hub(spec, draft=draft)
    if is_gguf(spec):
        return await import_gguf(spec, base_path)
    folder = local_folder(spec, base_path)
    await asyncio.to_thread(check_folder, folder, draft=draft)
    return folder


def own_folder(name: str, base_path: Path) -> Path | None:
    """Return the folder that an import or a fetch made under `name`; None without one.

    The demo model is none of them: each version builds its own.
    """
    folder = base_path / "models" / name
    made = name != DEMO_ID and _NAME.fullmatch(name) and os.path.isfile(folder / "config.json")
    return folder if made else None


def local_folder(spec: str, base_path: Path) -> Path:
    """Return the folder that a local `spec` means: the path if it exists, else one of ours of that name."""
    folder = local_path(spec)
    return folder if os.path.exists(folder) else own_folder(spec, base_path) or folder


def default_folder(base_path: Path) -> Path:
    return base_path / "models" / DEFAULT_ID


async def fetch_default_model(base_path: Path) -> Path:
    """Return the folder of `DEFAULT_ID`, downloaded and converted if need be. Raises ModelError."""
    return await _run_builder("omlxd.models.fetch.smollm", str(default_folder(base_path)))


async def fetch_from_hub(
    repo: str, note: Callable[[int, int], None] | None = None, *, draft: bool = True
) -> Path:
    """Return the folder of hub model `repo` (ORG/NAME), downloaded if need be. Raises ModelError.

    draft  it may be a drafter
    note  is told how far it is, in bytes of bytes; without it the terminal is
    """
    if not is_hub_id(repo):
        raise ModelError(no_hub_id(repo))
    progress = ["--progress"] if note else []
    return await _run_builder("omlxd.models.fetch.hub", repo, *progress, note=note, draft=draft)


class OnHub(msgspec.Struct):
    """What the hub says of a model. `sizes`: bytes of the files that a download takes; None: it does not say.
    `copies`: ids of quantised copies that it lists.
    """

    revision: str
    sizes: dict[str, int | None]
    copies: list[str] = []


async def look_up_on_hub(repo: str, folder: Path) -> OnHub:
    """Fetch config.json and the index of weights of hub model `repo` into `folder`. Raises ModelError."""
    said = await _run_program("omlxd.models.fetch.hub", repo, "--look-up", str(folder))
    return msgspec.json.decode(said, type=OnHub)


def imported_folder(file: str, base_path: Path) -> Path:
    """Return the model folder for an import of GGUF file `file`."""
    return base_path / "models" / model_id(file)


async def import_gguf(file: str, base_path: Path, name: str = "") -> Path:
    """Return the model folder of GGUF file `file`, imported if need be. Raises ModelError.

    name  of the folder; "": the file's own
    """
    source = local_path(file)
    target = imported_folder(name + ".gguf" if name else file, base_path)
    return await _run_builder("omlxd.models.gguf.importing", str(source), str(target))


class Progress(msgspec.Struct):
    """A builder's progress in bytes, as a line of its output."""

    done: int
    total: int


async def _run_builder(
    module: str, *arguments: str, note: Callable[[int, int], None] | None = None, draft: bool = False
) -> Path:
    """Return the folder that `python -m module arguments` prints."""
    folder = Path(await _run_program(module, *arguments, note=note))
    await asyncio.to_thread(check_folder, folder, draft=draft)
    return folder


async def _run_program(module: str, *arguments: str, note: Callable[[int, int], None] | None = None) -> str:
    """Return the last line of `python -m module arguments`, which may be one of error: a ModelError.

    Its standard error is ours, for progress bars. Its standard input closes when we die, which ends it.
    `note` is told of each line that is a `Progress`.
    """
    command, pipe = (sys.executable, "-m", module, *arguments), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, start_new_session=True, limit=1 << 20
    )
    assert process.stdout is not None
    last = ""
    try:
        async for line in process.stdout:
            said = line.decode(errors="replace").strip()
            if note is not None and said.startswith("{"):
                far = msgspec.json.decode(said, type=Progress)
                note(far.done, far.total)
            else:
                last = said or last
        await process.wait()
    finally:
        if process.returncode is None:  # Cancelled: omlxd is shutting down.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        # A network that is away, or pip, which downloads, may do so later.
        is_passing = process.returncode == os.EX_TEMPFAIL or module == "omlxd.models.fetch.smollm"
        raise ModelError(
            last or f"{module} failed with status {process.returncode}; its reason is in the log.",
            code="unavailable" if is_passing else None,
            retry_after=NETWORK_S if is_passing else None,
        )
    return last


# --------------------------------------------------------------------------- is a folder whole?


def check_folder(folder: Path, *, draft: bool = False) -> None:
    """Raise ModelError unless `folder` holds a config, whole weights and a tokenizer.

    draft  it may be a drafter, which needs no tokenizer
    """
    try:
        there = folder.exists()
    except OSError as error:
        raise ModelError(f"{folder} can't be read: {error.strerror or error}.") from error
    if not there:
        remedy = "give a model's folder, a name of `omlxd models list`, or a hub id as ORG/NAME"
        if folder.name == DEFAULT_ID:
            remedy = f"`omlxd models pull {DEFAULT_ID}` fetches it"
        raise ModelError(f"there is no folder {folder}; {remedy}.")
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file; give the folder that holds config.json.")
    try:
        _check_files(folder)
        is_drafter = drafter_kind(_check_config(folder)) is not None
        _check_json(folder)
        for path in _weight_files(folder):
            _check_weights(path)
    except OSError as error:
        raise ModelError(f"{error.filename or folder} can't be read: {error.strerror or error}.") from error
    if is_drafter and not draft:
        raise ModelError(
            f"{folder} holds a drafter, which guesses for another model; name it as that one's draft-model."
        )
    if not is_drafter and not any(all(any(folder.glob(name)) for name in names) for names in _TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer: tokenizer.json or tokenizer.model is missing.")


def _check_files(folder: Path) -> None:
    """Raise OSError for files that an engine would read without end, or wait for."""
    for path in folder.iterdir():
        if path.is_dir() or not path.exists():
            continue
        most = _MAX_TOKENIZER if path.name.startswith(_LARGE) else SMALL
        check_small(path.stat(), path, sys.maxsize if path.suffix not in _READ_AT_ONCE else most)


_JSON = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
)
"""Files that loaders read beside config.json, and may do without."""


def _check_json(folder: Path) -> None:
    """Raise ModelError for what ends a loader with no word of its file; malformed JSON does not."""
    for path in (folder / name for name in _JSON):
        if not path.is_file():
            continue
        try:
            json.loads(read_small(path).decode())
        except json.JSONDecodeError:
            continue
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} can't be read as JSON: {error}.") from error


def parse_config(data: bytes) -> Any:
    """Parse config.json. Raises ValueError and RecursionError.

    Some hold an Infinity, which msgspec refuses.
    """
    config = json.loads(data.decode())
    msgspec.json.encode(config)  # A lone half of a surrogate pair is an error: no answer could hold it.
    return config


def _check_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} is no model folder: config.json is missing.")
    try:
        config = parse_config(read_small(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON object ({error}).") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is no JSON object.")
    if "model_type" not in config and drafter_kind(config) is None:
        raise ModelError(f"{path} does not say its model_type.")
    return config


def _weight_files(folder: Path) -> list[Path]:
    """List every weight file, those that the index names included, whether they exist or not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        result = sorted(folder.glob("[!.]*.safetensors"))  # Not macOS's `._` files.
        if not result:
            raise ModelError(f"{folder} has no weights: there is no *.safetensors file in it.")
        return result
    try:
        names = sorted(set(read_json(index, WeightIndex).weight_map.values()))
    except BrokenJSON as error:
        raise ModelError(f"{index} is no index of weights ({error}).") from error
    missing = [name for name in names if not os.path.isfile(folder / name)]
    there = sorted(folder.glob("model*.safetensors"))  # mlx-lm loads these, whatever the index says.
    if missing and _are_complete([path.name for path in there if path.name not in names]):
        return there
    if missing:
        raise ModelError(
            f"{folder} is half-written: {len(missing)} of {len(names)} weight files are missing, "
            f"the first is {missing[0]} (of {index.name}). Finish the copy or the download."
        )
    return [folder / name for name in names]


_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def _are_complete(names: list[str]) -> bool:
    """Return whether there are weight files, and no shard whose others are missing."""
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    sets = {(match[1], match[3]) for match in shards}
    return bool(names) and len(shards) == sum(int(number) for _, number in sets)


def _check_weights(path: Path) -> None:
    """Compare the size that a safetensors header promises with the file's."""
    with path.open("rb") as file:
        if file.read(8) == b"version ":
            raise ModelError(f"{path} is a git-lfs pointer, not weights; run `git lfs pull` there.")
    try:
        read_tensors(path)
    except ModelError as error:
        raise ModelError(f"{error.message}. Copy or download it again.") from error


class WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


class Tensor(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return a safetensors header's tensors. Raises OSError; ModelError for a shorter file."""
    size = file.stat().st_size
    check_small(file.stat(), file, sys.maxsize)
    with file.open("rb") as opened:
        header = safetensors_header(opened, size) or b""
    try:
        entries: dict[str, Tensor | None] = decode_json(header, dict[str, Tensor | None])
    except BrokenJSON as error:
        raise ModelError(f"{file} is truncated or no safetensors file ({size} bytes)") from error
    tensors = {name: tensor for name, tensor in entries.items() if tensor is not None}
    promised = 8 + len(header) + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size < promised:
        raise ModelError(f"{file} is truncated: {size} bytes of {promised}")
    return tensors
