"""What to say of a path that is not served: what was meant, or which APIs there are."""

from __future__ import annotations

import re
from collections.abc import Collection


def advice(path: str, served: Collection[str]) -> str:
    """A clause on `path`, which is none of the paths `served`; it ends a sentence."""
    plain = "/" + re.sub(r"/+", "/", path).strip("/")
    for meant in (plain, "/v1" + plain, "/v1" + plain.rpartition("/v1")[2]):
        if meant in served:
            return (
                f"there is no such path, but {meant}; the base URL of an OpenAI client ends in /v1, that of "
                "an Anthropic client in the port"
            )
    return (
        "there is no such path; this server speaks OpenAI's API (/v1/chat/completions, /v1/completions, "
        "/v1/responses) and Anthropic's (/v1/messages), and GET /v1/models lists its models"
    )
