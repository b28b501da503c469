"""Cold-tier files that commit 2744a18 wrote: blocks, checkpoints and a record of an answer are still read.

`data/cache_2744a18.tar.xz` holds two cache folders (a dense model with a thinking template, and a
hybrid one) and, in `answers.json`, the next request of each conversation with what 2744a18 answered.
"""

from __future__ import annotations

import json
import platform
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from daemon import BLOCK, Daemon, demo_model_with, family_model, own_usage, restored
from templates import QWEN3_THINKING

ARCHIVE = Path(__file__).parents[1] / "data" / "cache_2744a18.tar.xz"
MADE_WITH = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}
"""Versions in the files' namespace: another version is another namespace."""

pytestmark = pytest.mark.skipif(
    any(version(package) != wanted for package, wanted in MADE_WITH.items()),
    reason=f"the files were made with {MADE_WITH}",
)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thinking", "qwen3_5"])
def test_an_earlier_cache_folder_is_read(name: str, earlier: Path, tmp_path: Path):
    wanted: dict[str, Any] = json.loads((earlier / "answers.json").read_text())[name]
    model = demo_model_with(QWEN3_THINKING, tmp_path / "m") if name == "thinking" else family_model(name)
    with Daemon(earlier / name, model=model) as daemon:
        request = {"model": daemon.model, "messages": wanted["messages"], "temperature": 0, "max_tokens": 8}
        answer = daemon.post("/v1/chat/completions", request, headers={"session-id": "s"})
        assert answer.status_code == 200, answer.text
        usage, before = own_usage(answer.json()), wanted["second"]["usage"]
        # The answer of the dense model comes back without its thinking: its record puts the tokens back.
        assert restored(usage) == before["cached_cold"] >= wanted["total_tokens"] - BLOCK
        assert usage["computed"] == before["computed"]
        if platform.machine() == "x86_64" and platform.system() == "Linux":  # Where it was made: same bits.
            assert answer.json()["choices"][0]["message"] == wanted["second"]["text"]
