"""An engine program whose logits follow script.py; all else is real: tokenizer, template, KV, parsers.

    OMLXD_ENGINE_COMMAND="python tools/clients/scripted_engine.py" omlxd serve --model FOLDER

Every forward pass is computed; before sampling, the row of a scripted request gets the script's next
token as its only likely one. A raw prompt is not scripted.

OMLXD_SCRIPT_LOG names a file to which each request's end adds a line of JSON (`Played`): what the model
computed and what it took from the cache, in tokens, so that a check need not believe the daemon's usage.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from tokenizers import Tokenizer

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools")]

from clients.played import Played  # noqa: E402
from clients.script import answer_to, written  # noqa: E402
from omlxd.chat import Conversation, GenerateRequest  # noqa: E402
from omlxd.engine import __main__ as program  # noqa: E402
from omlxd.engine.schedule import decode_batch  # noqa: E402
from omlxd.engine.schedule.scheduler import Scheduler  # noqa: E402
from omlxd.engine.sequence import sampling  # noqa: E402
from omlxd.engine.sequence.sequence import Sequence, State  # noqa: E402
from omlxd.engine.server.new_sequence import SequenceMaker  # noqa: E402

LOG = "OMLXD_SCRIPT_LOG"
PACE = "OMLXD_SCRIPT_STEP_S"
"""Seconds that every step waits: a tiny model is too fast to be interrupted."""


@dataclass(slots=True)
class ScriptedRow(sampling.SamplerRow):
    """A row that says `script`, token by token."""

    script: tuple[int, ...] = ()


class Scripts:
    """Tokens of answers. Its own tokenizer: Hugging Face's are not re-entrant."""

    def __init__(self, folder: Path):
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._lock = threading.Lock()
        self._end = self._tokenizer.token_to_id("<|im_end|>")

    def of(self, request: GenerateRequest, tokens: list[int]) -> tuple[int, ...]:
        """What the model says to `request`, whose prompt is `tokens`; () for a raw prompt."""
        if not isinstance(request.prompt, Conversation):
            return ()
        with self._lock:
            tail = self._tokenizer.decode(tokens[-8:], skip_special_tokens=False)
            text = written(answer_to(request.prompt), tail)
            return (*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end)


def install() -> None:
    """Put the script between the model and the sampler."""
    plain_sampler, plain_call = SequenceMaker._sampler, sampling.BatchSampler.__call__
    plain_init, plain_over = SequenceMaker.__init__, Scheduler._over
    log = Path(os.environ[LOG]) if os.environ.get(LOG) else None
    pace = float(os.environ.get(PACE, "0"))

    def init(self: Any, load: Any, *arguments: Any, **named: Any) -> None:
        self.scripts = Scripts(Path(load.model_path))
        plain_init(self, load, *arguments, **named)

    def sampler(self: Any, request: GenerateRequest, checked: Any) -> Any:
        row = plain_sampler(self, request, checked)
        # Fields as they are at this moment: whatever the plain row carries, the scripted one does.
        fields = {name: getattr(row, name) for name in row.__dataclass_fields__}
        return ScriptedRow(**fields, script=self.scripts.of(request, checked.tokens))

    def call(self: Any, logits: mx.array) -> Any:
        if pace:
            time.sleep(pace)
        return plain_call(self, forced(self.rows, logits))

    def over(self: Any, sequence: Sequence) -> None:
        done = sequence.state is State.DONE
        played = None if done or log is None else _played(sequence)
        plain_over(self, sequence)
        if played is not None and log is not None:
            with log.open("ab") as file:
                file.write(msgspec.json.encode(played) + b"\n")

    decode_batch.sampler_rows = scripted_rows
    SequenceMaker.__init__ = init
    SequenceMaker._sampler = sampler
    sampling.BatchSampler.__call__ = call
    Scheduler._over = over


def scripted_rows(row: sampling.SamplerRow, guesses: Seq[int], masks: Seq[Any]) -> list[sampling.SamplerRow]:
    """`sampling.sampler_rows`, where a scripted row has a step of its own for each token of a verify step.

    A plain greedy row stands for all of them, since its step has no effect; of a script it is the place.
    """
    rows = sampling.sampler_rows(row, guesses, masks)
    if isinstance(row, ScriptedRow) and rows[0] is row:
        return [replace(row, step=row.step + place) for place in range(len(rows))]
    return rows


def forced(rows: list[Any], logits: mx.array) -> mx.array:
    """`logits` (rows, vocabulary) with all but the script's token of each scripted row out of reach."""
    lifted = []
    for row in rows:
        script = getattr(row, "script", ())
        token = script[row.step] if row.step < len(script) else script[-1] if script else -1
        lifted.append(token)
    if max(lifted) < 0:
        return logits
    wanted = mx.array(lifted)[:, None]
    others = mx.arange(logits.shape[-1])[None] != wanted
    return mx.where((wanted >= 0) & others, mx.array(-1e9, logits.dtype), logits)


def _played(sequence: Sequence) -> Played:
    return Played(
        id=sequence.id,
        tokens=list(sequence.tokens),
        prompt=sequence.prompt.length,
        computed=sequence.kv.length,
        cached=sequence.stats.restored_hot + sequence.stats.restored_cold,
        cancelled=sequence.cancelled,
        began=sequence.stats.received,
        ended=time.monotonic(),
    )


if __name__ == "__main__":
    install()
    program.main()
