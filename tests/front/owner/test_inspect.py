"""`POST /omlxd/inspect`: one prompt at a time, and a folder that does not grow for good."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine

from omlxd.errors import InvalidRequest, OmlxdError
from omlxd.front.owner.inspect import KEPT, inspect_prompt, parse_inspect


@pytest.mark.parametrize("body", [b'{"prompt": ["abc", "b"]}', b'{"prompt": "abc", "n": 2}'])
def test_more_than_one_prompt_is_refused(body: bytes):
    with pytest.raises(InvalidRequest, match="one answer"):
        parse_inspect(body)


async def test_the_newest_files_stay(tmp_path: Path):
    (folder := tmp_path / "inspect").mkdir()
    for number in range(KEPT + 8):
        (folder / f"{number:03}.safetensors").touch()
    pool = SimpleNamespace(catalog=SimpleNamespace(settings=SimpleNamespace(base_path=tmp_path)))
    with pytest.raises((OmlxdError, OSError, ValueError)):  # The engine here writes no file.
        await inspect_prompt(pool, FakeEngine(), parse_inspect(b'{"prompt": "abc"}'))  # type: ignore[arg-type]
    names = sorted(path.name for path in folder.iterdir())
    assert names[:2] == ["009.safetensors", "010.safetensors"] and len(names) <= KEPT
