"""Settings of `omlxd serve`, and where each value came from.

Order: flag, then environment (`OMLXD_` and the flag's name in upper snake case), then the TOML
file's `[serve]` table, then the default. One table of `Option`s drives all four, so that a name
is spelled the same everywhere. Every value goes through its option's parser as text, so that a
flag, a variable and a line of the file are refused for the same reasons, each by its own name.
The file alone may also hold settings of single models, under `[models."org/name"]` (models.py).
"""

from .flags import add_flags
from .models import ModelSettings, closest, full_name
from .options import OPTIONS, Option, Settings
from .parsers import is_loopback
from .reading import load_settings

__all__ = [
    "OPTIONS",
    "ModelSettings",
    "Option",
    "Settings",
    "add_flags",
    "closest",
    "full_name",
    "is_loopback",
    "load_settings",
]
