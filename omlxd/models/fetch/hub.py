"""`python -m omlxd.models.fetch.hub ORG/NAME [--progress | --look-up FOLDER]`: fetches a model into the hub's
cache, or its config.json and index of weights alone into FOLDER.

Prints the folder, or with status 1 why not. Progress goes to standard error, or with `--progress` before it
as lines of JSON. A download goes on where it stopped. It is a program of its own so that the front never
imports the hub's client. A look-up prints a `resolve.OnHub` as JSON instead of a folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects
from tqdm import tqdm

from ...common.files import write_atomic
from ..builder import end_with_parent

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
"""Patterns of a model's files. Code (`*.py`) is neither fetched nor run."""
TWICE = ["consolidated*.safetensors", "original/*"]
"""Patterns of second copies of weights in Mistral's, Meta's and OpenAI's repositories."""


class _Lines(tqdm):
    """A progress bar of the hub's client that prints lines (`resolve.Progress`) instead."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"file": io.StringIO(), "mininterval": 0.5})

    def close(self) -> None:
        """Close the bar without its line, which would follow the folder's."""
        self.disable = True

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.unit == "B":
            print(json.dumps({"done": int(self.n), "total": int(self.total or 0)}), flush=True)


def _download(repo: str, bar: Any) -> str:
    """Download the folder of `repo`. That of its main branch is named once it is whole: the client names it
    first, and a download that breaks off would leave no model.
    """
    options: dict[str, Any] = {"allow_patterns": PATTERNS, "ignore_patterns": TWICE, "tqdm_class": bar}
    try:
        revision = HfApi().model_info(repo).sha
    except Exception as error:  # Its own words for it follow, unless the model is here.
        return snapshot_download(repo, local_files_only=_is_unreachable(error), **options)
    folder = Path(snapshot_download(repo, revision=revision, **options))
    refs = folder.parents[1] / "refs"
    with contextlib.suppress(OSError):  # The cache may be read-only.
        refs.mkdir(exist_ok=True)
        write_atomic(refs / "main", folder.name.encode(), 0o644)
    return str(folder)


LOOKED_UP = ("config.json", "model.safetensors.index.json")
MOST_LOOKED_UP = 16 << 20
"""Bytes of a file that is looked up."""
QUANTISER = "mlx-community"
"""Who publishes quantised copies of most models."""


def _look_up(repo: str, folder: str) -> str:
    """Fetch `LOOKED_UP` of `repo` into `folder`; returns a `resolve.OnHub` as JSON."""
    disable_progress_bars()
    info = HfApi().model_info(repo, files_metadata=True)
    sizes = {each.rfilename: each.size for each in info.siblings or ()}
    for name in LOOKED_UP:
        if name in sizes and (sizes[name] or 0) <= MOST_LOOKED_UP:
            hf_hub_download(repo, name, revision=info.sha, local_dir=folder)
    taken = filter_repo_objects(sizes, allow_patterns=PATTERNS, ignore_patterns=TWICE)
    found = {"revision": info.sha, "sizes": {name: sizes[name] for name in taken}, "copies": _copies(repo)}
    return json.dumps(found)


def _copies(repo: str) -> list[str]:
    """Return ids of quantised copies of `repo` that the hub lists."""
    name = re.sub(r"-(\d+bit|bf16|fp16|mxfp4|mlx).*", "", repo.partition("/")[2], flags=re.IGNORECASE)
    copy = re.compile(re.escape(f"{QUANTISER}/{name}-") + r"(\d+bit|mxfp\d|nvfp\d)", re.IGNORECASE)
    with contextlib.suppress(Exception):  # It is no part of the question.
        listed = HfApi().list_models(author=QUANTISER, search=name, limit=50)
        return sorted(each.id for each in listed if copy.fullmatch(each.id) and each.id != repo)
    return []


def _is_unreachable(error: Exception) -> bool:
    """Return whether the hub was not reached. Its client raises the TransportError of httpx or of httpx2:
    which one is there depends on the client's version, so omlxd imports neither.
    """
    if isinstance(error, ConnectionError | LocalEntryNotFoundError):
        return True
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _remedy() -> str:
    if not is_offline_mode():
        return "; check the network"
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return f", as {name} is set; unset it"


def main(argv: list[str]) -> int:
    repo, *rest = argv
    verb = "looked up" if "--look-up" in rest else "downloaded"
    try:
        bar: Any = _Lines if "--progress" in rest else None
        print(_look_up(repo, rest[1]) if verb == "looked up" else _download(repo, bar))
        return 0
    except GatedRepoError:
        problem = f"{repo} asks for its terms to be accepted: do so on its hub page, then set HF_TOKEN."
    except RepositoryNotFoundError:
        problem = f"the hub has no model {repo}, or it is private: check the name, or set HF_TOKEN."
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if _is_unreachable(error):
            reason = f"the hub can't be reached{_remedy()}."
        problem = f"{repo} can't be {verb}: {reason}"
        if _is_unreachable(error):
            print(problem)
            return os.EX_TEMPFAIL
    print(problem)
    return 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m omlxd.models.fetch.hub ORG/NAME [--progress | --look-up FOLDER]")
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
