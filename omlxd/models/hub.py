"""`python -m omlxd.models.hub ORG/NAME`: fetches a model from the hub into its client's own cache.

Prints the folder, or with status 1 why not; progress goes to standard error. A download goes on where it
stopped. It is a program of its own so that the front never imports the hub's client.
"""

from __future__ import annotations

import sys

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from .builder import end_with_parent

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
"""What a model is loaded from. Code (`*.py`) is neither fetched nor run."""


def main(argv: list[str]) -> int:
    repo = argv[0]
    try:
        print(snapshot_download(repo, allow_patterns=PATTERNS))
    except GatedRepoError:
        return _fail(f"{repo} asks for its terms to be accepted: do so on its hub page, then set HF_TOKEN.")
    except RepositoryNotFoundError:
        return _fail(f"the hub has no model {repo}, or it is private: check the name, or set HF_TOKEN.")
    except (ConnectionError, httpx.TransportError, LocalEntryNotFoundError):
        return _fail(
            f"{repo} can't be downloaded: the hub can't be reached; check the network, "
            "or unset HF_HUB_OFFLINE."
        )
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return _fail(f"{repo} can't be downloaded: {reason[0]}")
    return 0


def _fail(sentence: str) -> int:
    print(sentence)
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m omlxd.models.hub ORG/NAME")
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
