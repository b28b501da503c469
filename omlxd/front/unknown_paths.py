"""What to say of a path that is not served: what was meant, or that there is no such thing here."""

from __future__ import annotations

import re
from collections.abc import Collection

NOT_HERE = {
    "embeddings": "it computes no embeddings",
    "audio": "it neither hears nor speaks",
    "images": "it makes no images",
    "moderations": "it moderates nothing",
    "rerank": "it ranks no documents",
    "files": "it keeps no files",
    "batches": "it takes requests one by one",
    "messages/batches": "it takes requests one by one; send each to /v1/messages",
    "complete": "of Anthropic's API it has /v1/messages",
    "skills": "it has no skills",
    "assistants": "it keeps no assistants",
    "threads": "it keeps no threads; /v1/responses has previous_response_id",
    "conversations": "it keeps no conversations; /v1/responses has previous_response_id",
    "fine_tuning": "it trains no models",
}
"""First part of a path under /v1, or its first two → why it is not there."""


def advice(path: str, served: Collection[str]) -> str:
    """A clause on `path`, which is none of the paths `served`; it ends a sentence."""
    plain = "/" + re.sub(r"/+", "/", path).strip("/")
    for meant in (plain, "/v1" + plain, re.sub(r"^(/v1)+", "/v1", plain)):
        if meant in served:
            return (
                f"there is no such path, but {meant}; the base URL of an OpenAI client ends in /v1, that of "
                "an Anthropic client in the port"
            )
    if path.startswith("/api/"):
        return "this server speaks OpenAI's and Anthropic's APIs, under /v1; GET /v1/models lists its models"
    parts = plain.removeprefix("/v1").strip("/").split("/")
    for beginning in ("/".join(parts[:2]), parts[0]):
        if beginning in NOT_HERE:
            return f"this server has no such path: {NOT_HERE[beginning]}"
    return "there is no such path"
