"""Settings of `omlxd serve`, and the source of each value.

Order: flag, then environment (`OMLXD_PORT`), then the TOML file's `[serve]` table, then the default. The
fields of `Settings` drive all four, and one conversion (values.py) checks them. The file may also have
settings of single models, under `[models."org/name"]`, and sampling for all of them, under `[defaults]`.
"""

from .reading import (
    flags_of,
    load_settings,
    read_settings,
    settings_of,
    unknown_variables,
    warnings_of,
    where_else,
)
from .settings import (
    BY_NAME,
    FOR_ALL,
    NEXT_LOAD,
    OPTIONS,
    SAMPLING,
    ModelSettings,
    Option,
    Settings,
    add_flags,
    add_grouped_flags,
    add_join_flags,
    full_name,
    has_ssd_cache,
    ssd_cap,
)
from .values import closest, is_loopback
