"""`POST /omlxd/cache/forget`: files of the SSD cache that its owner wants gone, or has removed himself."""

from __future__ import annotations

import msgspec

from ...api.body import decode
from ...cli.owner_api import Forget, Forgotten
from ...errors import InvalidRequest, Unavailable
from ...kv.files.paths import is_stored_path
from ..engines.protocol import Engines

_FORGET = msgspec.json.Decoder(Forget)


async def forget(engines: Engines, body: bytes) -> Forgotten:
    """Raises OmlxdError."""
    asked = decode(_FORGET, body)
    for path in asked.paths:
        if not is_stored_path(path):
            raise InvalidRequest(
                f"paths: {path[:200]!r} is no block or record in the cache dir.", param="paths"
            )
    done = await engines.cold_forget(asked.paths, asked.remove)
    if done is None:
        raise Unavailable("This daemon has no SSD cache.")
    files, nbytes, troubles = done
    return Forgotten(files, nbytes, troubles)
