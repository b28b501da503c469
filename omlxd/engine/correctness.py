"""Counters that are zero on clean traffic, and the line that the log gets of a request that isn't.

| counter                           | means                                                            |
|-----------------------------------|------------------------------------------------------------------|
| prompt_turns_healed               | an echo would have had other tokens than were generated          |
| prompt_turns_not_healed_<reason>  | and they could not be put back (healing.py)                      |
| prompt_turn_records_bad           | a remembered turn's file failed its check (turn_files.py)         |
| prompt_canonical_rejected         | a conversation goes on as before, and its tokens do not          |
| prompt_control_tokens_exposed     | somebody's control tokens are read as such: the text can't be cut |
| kv_checkpoint_missing             | blocks are cached further than the deepest checkpoint             |
| requests_timed_out                | the watchdog ended it                                             |

The log tells no text: counts, reasons, token positions, and a digest of the session's name.
"""

from __future__ import annotations

import hashlib
import logging
import threading

from .prompt import RenderedPrompt
from .sequence import Sequence
from .sessions import Standing

log = logging.getLogger(__name__)


class Correctness:
    """Thread-safe. `block_size` in tokens."""

    def __init__(self, block_size: int):
        self._block = block_size
        self._lock = threading.Lock()
        self._exposed = 0
        self._missing = 0

    def note(self, sequence: Sequence, rendered: RenderedPrompt, standing: Standing) -> None:
        """A request is over, however it ended."""
        found: dict[str, object] = {}
        if rendered.healed:
            found["healed"] = rendered.healed
        if rendered.refused:
            found["not_healed"] = ",".join(rendered.refused)
        if rendered.exposed:
            found["control_tokens_exposed"] = "yes"
        if standing.rejected_at is not None:
            found["canonical_rejected_at_token"] = standing.rejected_at * self._block
        if sequence.unreached:
            found["checkpoint_missing_tokens"] = sequence.unreached * self._block
        with self._lock:
            self._exposed += rendered.exposed
            self._missing += bool(sequence.unreached)
        log.log(
            logging.INFO if found else logging.DEBUG,
            "request %d: session=%s %s prompt=%d cached=%d %s",
            sequence.id,
            hashlib.blake2b(sequence.session.encode("utf-8", "replace"), digest_size=4).hexdigest(),
            "extends" if standing.extends else "begins",
            sequence.prompt_length,
            sequence.restored_hot + sequence.restored_cold,
            " ".join(f"{name}={value}" for name, value in found.items()) or "clean",
        )

    def figures(self) -> dict[str, float]:
        return {
            "prompt_control_tokens_exposed_total": self._exposed,
            "kv_checkpoint_missing_total": self._missing,
        }
