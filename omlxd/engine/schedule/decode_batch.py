"""Sequences that decode together: one forward pass a step, joined and left between steps.

A step is started before the one before it has been read, so the device never waits for the host:
`step` starts step n + 1 from tokens that are still on the device, then hands out those of step n.
A row that ends is noticed one step late; its extra token is thrown away.

One row keeps the cache that it was prefilled into: no merge, no padding, no mask. So do the rows of a batch
where attention goes row by row, or reads rows where they lie (cache/rows.py, cache/tails.py of mlx_adapter/).
Elsewhere joining copies every row's KV, as stock attention wants one array, so `best_batch` weighs it.

A step may also check guesses (speculate/controller.py); such a pass is read before the next one starts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import mlx.core as mx

from .. import mlx_adapter
from ..mlx_adapter import DecodeStep, LoadedModel
from ..sequence.sampling import NO_TOKEN, BatchSampler, StepLogprobs, likelihoods, sampler_rows
from ..sequence.sequence import Likelihood, SamplerRow, Sequence
from ..speculate.controller import Speculation
from ..speculate.draft_model import DraftRows, Wanted, clock, drafting, seeded
from ..speculate.drafter import DrafterRows
from ..speculate.row import DRAFT, Offer, RowSpeculator
from ..speculate.times import NEWEST
from ..speculate.verify import MOST_TOKENS, WIDTHS, filled_up, most_of_row

log = logging.getLogger(__name__)

Draw = tuple[Sequence, int, Likelihood | None]
"""A token that was drawn for a row, and how likely it was if the row wants that."""


@dataclass(slots=True)
class Turn:
    """What one call of `step` did, until its time is known.

    began, checked  on the clock: when the call began, when its pass with guesses began
    behind   the turn before started no step ahead
    waited   `wait` was called before: the time of this turn is no whole step's
    plain    steps without guesses, of the same rows, that came right before
    propose_s  seconds that it took to propose drafts
    spared   seconds that do not count against the guesses
    guesses  of a row in its pass; 0: there was no such pass
    drawn    what the call returned; `read` of them come from a step that began before
    """

    began: float
    rows: int
    behind: bool
    waited: bool
    plain: int
    propose_s: float = 0.0
    checked: float = 0.0
    spared: float = 0.0
    guesses: float = 0
    packed: bool = False
    compiled: bool = False
    drawn: Seq[Draw] = ()
    read: int = 0


@dataclass(slots=True)
class _LastTurns:
    """What the turns before say of the next one.

    waited   `wait` was called since: the next turn's time is no whole step's
    behind   the last one started no step ahead
    plain    steps in a row, of the same rows, without draft tokens
    is_behind_verify  a turn for draft tokens came, and no steady step since
    rest     steps until drafts are proposed again; `vain`: proposals in vain
    """

    waited: bool = False
    behind: bool = False
    plain: int = 0
    is_behind_verify: bool = False
    rest: int = 0
    vain: int = 0


class DecodeBatch:
    """Rows are `Sequence`s, prefilled.

    model        called as model(tokens (rows, n), cache=…)
    speculation  of the engine; None: every pass computes one token a row
    grid         no pass with guesses goes beyond its multiples: there state at a position is kept; 0: any may
    compiled     steps of the model; None: each is built anew
    sampler      made for each composition of the rows
    """

    def __init__(
        self,
        model: Any,
        speculation: Speculation | None = None,
        grid: int = 0,
        compiled: DecodeStep | None = None,
        sampler: Callable[[Seq[SamplerRow]], BatchSampler] = BatchSampler,
    ):
        self._model = model
        self._make_sampler = sampler
        self._compiled = compiled
        self._steps = 0  # Since the rows changed.
        self._grid = grid
        self._speculation = speculation
        self._packed = 0
        self._speculators: dict[Sequence, RowSpeculator] = {}
        self._speculates = False
        self._drafts: DraftRows | DrafterRows | None = None
        self.rows: list[Sequence] = []
        self._cache: mlx_adapter.Cache = []
        self._merged = False
        self._left: list[mlx_adapter.RowTail] = []  # Of rows that have left: a step on its way writes there.
        self._inputs: mx.array | None = None
        self._unread: list[bool] = []
        self._sampler: BatchSampler | None = None
        self._logprobs: tuple[list[SamplerRow], StepLogprobs | None] = [], None
        self._last = _LastTurns()
        self._turn: Turn | None = None

    # ----------------------------------------------------------------- joining and leaving

    def add_row(self, sequence: Sequence) -> None:
        """Add a prefilled row whose first token has been sampled, read and reported."""
        if not self.rows:
            self._cache, self._merged = sequence.take_cache(), False
            if mlx_adapter.joins_alone(self._cache):
                self._merge()
        else:
            self._extend(mlx_adapter.extend, sequence.take_cache())
        _advance(sequence, sequence.tokens[-1])
        self._append_rows([sequence])
        self._record_prompt(sequence)

    def add_prompts(self, sequences: Seq[Sequence], cache: mlx_adapter.Cache) -> None:
        """Add rows whose prompts are in a batch cache, but for their last tokens.

        The next step computes those, and draws the first tokens.
        """
        if not self.rows:
            self._cache, self._merged = cache, True
        else:
            self._extend(mlx_adapter.extend_batch, cache)
        self._append_rows(sequences)
        for sequence in sequences:
            self._record_prompt(sequence)

    def _extend(self, extend: Callable[..., None], cache: mlx_adapter.Cache) -> None:
        """Add a cache's rows to this one's. Where memory runs out amid the layers, no layer keeps them."""
        if not self._merged:
            self._merge()
        try:
            extend(self._cache, cache)
        except Exception:
            mlx_adapter.keep_rows(self._cache, range(len(self.rows)))
            raise

    def _merge(self) -> None:
        self._cache, self._merged = mlx_adapter.merge([self._cache]), True

    def _append_rows(self, sequences: Seq[Sequence]) -> None:
        newest = mx.array([sequence.tokens[-1] for sequence in sequences])
        self._inputs = newest if self._inputs is None else mx.concatenate([self._inputs, newest])
        self._unread += [False] * len(sequences)
        self.rows += sequences
        self._compose()

    def _compose(self) -> None:
        """The rows have changed."""
        self._sampler = None
        self._steps = self._last.rest = self._last.vain = 0
        self._last.plain, self._last.is_behind_verify = 0, False
        self._packed = self._most_packed()
        self._speculates, kept = self._may_speculate(), self._speculators
        self._speculators = {
            row: kept.get(row) or self._speculator(row) for row in (self.rows if self._speculates else ())
        }
        if self._drafts is not None:
            self._drafts.keep(self._speculators)

    def _speculator(self, row: Sequence) -> RowSpeculator:
        shared = self._speculation
        assert shared is not None
        if shared.draft_model is not None:
            self._drafts = self._drafts or shared.draft_model.rows()
            if not shared.repeatable:
                row.sampling.params = seeded(row.sampling.params)
            shared.rates[DRAFT].forget()
        return RowSpeculator(row.tokens, row.sampling.constraint, shared.rates, row.prompt.prediction)

    def _may_speculate(self) -> bool:
        if self._speculation is None or not mlx_adapter.can_take_back(self._cache, len(self.rows)):
            return False
        # 16 streams of SmolLM2 on an H100 decode 6,000 to 8,000 tokens a second without guesses: a step takes
        # 1.5 to 2 ms and waits for the host. More streams were not measured.
        most_rows = MOST_TOKENS // most_of_row()
        if self._speculation.draft_model is None and self._packed and len(self.rows) > most_rows:
            return False
        params = [row.sampling.params for row in self.rows]
        return not self._speculation.repeatable or all(p.greedy or p.seed is not None for p in params)

    def remove_rows(self, rows: Seq[Sequence]) -> None:
        """Remove `rows`. What they need of the cache must have been copied before."""
        keep = [i for i, sequence in enumerate(self.rows) if sequence not in rows]
        self.rows = [self.rows[i] for i in keep]
        self._unread = [self._unread[i] for i in keep]
        if not keep:
            self._cache, self._inputs, self._merged = [], None, False
            self._logprobs = [], None
        else:
            assert self._inputs is not None
            self._left += mlx_adapter.keep_rows(self._cache, keep)
            self._inputs = mlx_adapter.rows_at(self._inputs, keep)
        self._compose()

    def row_tensors(self, sequence: Sequence, start: int, stop: int) -> dict[str, mx.array]:
        """KV of tokens `start` to `stop` of a row; lazy slices. Evaluate and drop them before `step`."""
        if not self._merged:
            return mlx_adapter.token_range(self._cache, start, stop)
        index = self.rows.index(sequence)
        return mlx_adapter.row_tensors(self._cache, index, start, stop)

    def row_states(self, sequence: Sequence) -> dict[str, mx.array]:
        """State of a row that exists only at its position; lazy, as `row_tensors`."""
        if not self._merged:
            return mlx_adapter.state_tensors(self._cache)
        return mlx_adapter.row_states(self._cache, self.rows.index(sequence))

    # ----------------------------------------------------------------- stepping

    def step(self) -> list[Draw]:
        """Start a step, and return the tokens of the one before it (none on the first).

        After a pass with guesses a row has several tokens, in their order.
        """
        if not self._speculates:
            return self._step()
        assert self._speculation is not None
        self._turn = turn = Turn(
            clock(), len(self.rows), self._last.behind, self._last.waited, self._last.plain
        )
        self._last.waited, self._last.plain = False, 0
        proposes, self._last.rest = not self._last.rest, max(0, self._last.rest - 1)
        read: list[Draw] = []
        plan: list[tuple[list[int], list[Any]]] = []
        if proposes:
            self._catch_up()
            offers = self._offers({row: self._most_guesses for row in self.rows})
            width = self._best_width(offers)
            if width or self._draft_width(offers):
                read = self._read(self._inputs, self._unread)
                self._unread = [False] * len(self.rows)
            rooms = {row: row.sampling.max_new - row.generated - 1 for row in self.rows}
            for row, token, _ in read:
                rooms[row] -= 1
                if row.cancelled or rooms[row] < 0 or token in row.sampling.eos or token == NO_TOKEN:
                    self._turn = None
                    return read  # The row has ended.
            plan = self._plan(rooms, offers, width)
            self._last.vain = 0 if plan else self._last.vain + 1
            self._last.rest = self._speculation.propose_interval(len(self.rows), self._last.vain) - 1
            turn.propose_s = clock() - turn.began
        drawn = self._check(plan) if plan else self._step()
        turn.drawn, turn.read = read + drawn, len(read)
        self._last.behind = bool(plan)
        return turn.drawn

    def end_turn(self) -> None:
        """Note what the turn took and what its guesses won. Call it once the tokens of `step` are handed on.

        No step runs behind a pass with guesses meanwhile, so handing its tokens on is part of its time.
        """
        turn, self._turn = self._turn, None
        if turn is None or self._speculation is None:
            return
        now, spared = clock(), turn.spared
        if turn.guesses:
            spared += self._speculation.times.record_verify(
                turn.rows, turn.guesses, now - turn.checked, packed=turn.packed, compiled=turn.compiled
            )
        seconds = now - turn.began - spared
        if turn.guesses or turn.read or (turn.behind and not turn.drawn):
            self._settle(turn, seconds)
            self._last.is_behind_verify = True
        elif turn.drawn and not turn.waited:
            self._last.plain, seconds = turn.plain + 1, seconds - turn.propose_s
            steady = turn.plain >= NEWEST
            if self._last.is_behind_verify and not steady:
                self._settle(turn, seconds)
            self._speculation.record_step(turn.rows, seconds, steady=steady)

    def _settle(self, turn: Turn, seconds: float) -> None:
        """Count what a turn won or lost each row.

        Plain steps behind a pass count, too, up to a steady one. The pass's tokens are handed on meanwhile,
        and caches are cold: with 16 rows of SmolLM2 on H100s each such step takes 1.2 to 1.4 steady ones.
        Before these steps counted, four stories there were at 0.94 of the speed without guesses.
        """
        assert self._speculation is not None
        took = self._speculation.settle(turn.rows, len(turn.drawn), seconds)
        tokens = Counter(row for row, _, _ in turn.drawn)
        for row, speculator in self._speculators.items():
            speculator.won += tokens[row] - took

    def _catch_up(self) -> None:
        """Give the speculators the tokens of steps before which nothing was proposed."""
        for row, speculator in self._speculators.items():
            if missed := row.tokens[len(speculator.tokens) :]:
                speculator.add_tokens(missed)

    def _offers(self, rooms: Mapping[Sequence, int]) -> list[Offer]:
        """Of each row, which may have `rooms[row]` guesses."""
        return [self._speculators[row].offer(rooms[row]) for row in self.rows]

    def _plan(
        self, rooms: Mapping[Sequence, int], offers: list[Offer], width: int
    ) -> list[tuple[list[int], list[Any]]]:
        """(guesses, masks along them) of each row for the next pass; empty where a plain step is faster.

        rooms   guesses that a row may have
        offers  before this step's tokens were read; `width`: the best width for them
        """
        if any(self._unread):
            return []
        if self._grid:
            rooms = {
                row: min(room, self._grid - 1 - row.kv.length % self._grid) for row, room in rooms.items()
            }
        most = self._most_guesses
        # Penalties are made at a row's first step: before it, each guess would get some of its own.
        unmade = {row for row in rooms if row.sampling.params.penalised and row.sampling.penalties is None}
        rooms = {row: 0 if row in unmade else min(room, most) for row, room in rooms.items()}
        self._draft(rooms)
        if (now := self._offers(rooms)) != offers:
            width = self._best_width(now)
        plan: list[tuple[list[int], list[Any]]] = []
        for row in self.rows if width else ():
            guess, masks = self._speculators[row].draft[: min(width, rooms[row])], []
            if guess and (constraint := row.sampling.binding) is not None:
                masks = constraint.masks_along(guess)
                guess = guess[: len(masks) - 1]
            plan.append((guess, masks))
        return plan if any(guess for guess, _ in plan) else []

    def _most_packed(self) -> int:
        """Return the tokens of a packed verify step (speculate/controller.py) at most; 0: passes are as
        wide as the longest guess."""
        if self._speculation is None or self._compiled is None or not (self.rows and self._is_plain()):
            return 0
        most = self._compiled.most_tokens(self._cache)
        return most if most > len(self.rows) else 0

    @property
    def _most_guesses(self) -> int:
        """Of a row, in any pass."""
        return min(WIDTHS[-1], self._packed - len(self.rows)) if self._packed else WIDTHS[-1]

    def _best_width(self, offers: Seq[Offer]) -> int:
        assert self._speculation is not None
        return self._speculation.best_width(offers, self._packed)

    def _draft_rates(self) -> list[float]:
        """Of each row, the share of the draft model's guesses that hold. It sees no images."""
        return [self._speculators[row].draft_rate if row.prompt.images is None else 0.0 for row in self.rows]

    def _draft_width(self, offers: Seq[Offer]) -> int:
        if self._drafts is None or self._speculation is None:
            return 0
        rates = self._draft_rates()
        return self._speculation.draft_width(offers, rates, self._most_guesses, self._packed)

    def _draft(self, rooms: Mapping[Sequence, int]) -> None:
        """Have the draft model guess for the rows where that is better, if the next pass gains by it."""
        offers = self._offers(rooms)
        width = self._draft_width(offers)
        if not width or self._drafts is None or self._speculation is None:
            return
        wanted = [
            Wanted(row, self._speculators[row].tokens, drafting(row.sampling))
            for row, rate, own in zip(self.rows, self._draft_rates(), offers, strict=True)
            if rate > own.share and rooms[row] > 0
        ]
        began = clock()
        for row, guess in self._drafts.propose(wanted, width).items():
            self._speculators[row].take_draft(guess)
        if self._drafts.seconds:
            self._speculation.record_draft(len(self.rows), width, self._drafts.seconds)
        elif self._turn is not None:  # It computed KV of the prompt.
            self._turn.spared += clock() - began

    def _check(self, plan: Seq[tuple[list[int], list[Any]]]) -> list[Draw]:
        """Compute each row's newest token and its guesses in one pass.

        Returns the tokens drawn, of each row up to the first that was not guessed.
        """
        assert self._inputs is not None and self._speculation is not None and self._turn is not None
        turn, width = self._turn, max(len(guess) for guess, _ in plan)
        turn.checked, turn.guesses = clock(), width
        recurrent, inputs = mlx_adapter.recurrent_states(self._cache), self._inputs[:, None]
        samplers = [
            sampler_rows(row.sampling, guess, masks)
            for row, (guess, masks) in zip(self.rows, plan, strict=True)
        ]
        counts = [len(guess) + 1 for guess, _ in plan]
        logits = self._forward_packed([guess for guess, _ in plan], counts) if self._packed else None
        if logits is not None and self._compiled is not None:
            turn.guesses, turn.packed = logits.shape[0] / len(plan) - 1, True
            turn.compiled = self._compiled.compiles
            logits = logits[: sum(counts)]
        else:
            padded = [[*guess, *[0] * (width - len(guess))] for guess, _ in plan]
            inputs = mx.concatenate([inputs, mx.array(padded, inputs.dtype)], axis=1)
            with mlx_adapter.last_positions(width + 1):
                logits = self._forward(inputs)[:, -width - 1 :]
            logits = mx.concatenate([logits[i, :count] for i, count in enumerate(counts)])
        hidden = mlx_adapter.take_hidden()
        each_sampler = [each for own in samplers for each in own]
        sampler = BatchSampler(each_sampler)
        sampled = sampler(logits)
        mx.eval(sampled, *(sampler.logprobs or ()))
        self._let_go()
        likely = likelihoods(each_sampler, sampler.logprobs)
        drawn = iter(zip(cast(list[int], sampled.tolist()), likely, strict=True))
        draws: list[Draw] = []
        kept: list[list[int]] = []
        for index, (row, (guess, _), own) in enumerate(zip(self.rows, plan, samplers, strict=True)):
            of_row = list(islice(drawn, len(own)))
            count = 1 + _held(guess, [token for token, _ in of_row], row.sampling.eos)
            kept.append([token for token, _ in of_row[:count]])
            draws += [(row, token, likelihood) for token, likelihood in of_row[:count]]
            self._record(row, hidden[index, :count] if hidden is not None else None)
            row.kv.length += count
            row.sampling.step, row.sampling.penalties = own[count - 1].step, own[count - 1].penalties
        if recurrent and len(kept[0]) <= width:  # Of one row: what held is computed again.
            mlx_adapter.put_back(recurrent, self.rows[0].kv.length - len(kept[0]))
            mlx_adapter.trim(self._cache, [width + 1])
            mx.eval(self._forward(inputs[:, : len(kept[0])]))
        else:
            mlx_adapter.trim(self._cache, [width + 1 - len(tokens) for tokens in kept])
        self._inputs, self._unread = mx.array([tokens[-1] for tokens in kept]), [False] * len(kept)
        for row, tokens, (guess, _) in zip(self.rows, kept, plan, strict=True):
            for token in tokens:
                _advance(row, token)
            speculator = self._speculators[row]
            whose = {"of_model": speculator.of_model, "predicted": speculator.of_prediction}
            row.sink.count(partial(self._speculation.count, row, len(guess), len(tokens) - 1, **whose))
            speculator.add_tokens(tokens, len(guess))
        return draws

    def _step(self) -> list[Draw]:
        """One token a row."""
        inputs, unread = self._inputs, self._unread
        assert inputs is not None
        if self._sampler is None:
            self._sampler = self._make_sampler([sequence.sampling for sequence in self.rows])
        logits = self._forward(inputs[:, None])[:, -1, :]
        hidden = mlx_adapter.take_hidden()
        for index, row in enumerate(self.rows):
            self._record(row, hidden[index] if hidden is not None else None)
        draws: list[Draw] | None = None
        if self._sampler.constrained:
            # What a constrained row may say follows from its token of the step before: that is read
            # here, while the device is at work on this one.
            mx.async_eval(logits)
            draws = self._read(inputs, unread)
        self._inputs = self._sampler(logits)
        logprobs = self._sampler.logprobs
        mx.async_eval(self._inputs, *(logprobs or ()))
        self._unread = [True] * len(self.rows)
        for sequence in self.rows:
            sequence.kv.length += 1
        if draws is None:
            draws = self._read(inputs, unread)
        if any(unread):
            self._let_go()
        self._logprobs = self._sampler.rows, logprobs
        return draws

    def _let_go(self) -> None:
        """Free the KV of rows that have left: the step that was on its way then has been computed."""
        mlx_adapter.let_go(self._left)
        self._left.clear()

    def wait(self) -> None:
        """Until the step that was started last has been computed."""
        self._last.waited = True
        if self._inputs is not None:
            mx.eval(self._inputs)

    def _is_plain(self) -> bool:
        """Whether passes need nothing but tokens and cache."""
        plain = all(
            row.adapter is None and (row.prompt.images is None or not row.prompt.images.delta)
            for row in self.rows
        )
        return plain and not mlx_adapter.keeps_hidden()

    def _forward_packed(self, guesses: Seq[list[int]], counts: Seq[int]) -> mx.array | None:
        """Logits (any, vocabulary) of each row's newest token and its guesses, one row's behind the other's,
        and of what fills the pass up; None: there is no such pass.

        counts  of each row's tokens
        """
        assert self._compiled is not None
        newest = (int(self._speculators[row].tokens[-1]) for row in self.rows)
        tokens = [token for first, own in zip(newest, guesses, strict=True) for token in (first, *own)]
        rows = len(guesses)
        tokens = filled_up(tokens, rows, self._packed)
        logits = self._compiled(mx.array(tokens), self._cache, self._steps, counts)
        self._steps += logits is not None
        if logits is None:
            self._packed = 0
        return logits

    def _forward(self, tokens: mx.array) -> mx.array:
        """Logits of `tokens` (rows, n), whose KV goes into the cache."""
        if self._compiled is not None and self._is_plain():
            logits = self._compiled(tokens, self._cache, self._steps)
            self._steps += 1
            if logits is not None:
                return logits
        deltas = [
            sequence.prompt.images.delta if sequence.prompt.images is not None else 0
            for sequence in self.rows
        ]
        moved = {"deltas": deltas} if any(deltas) else {}
        adapters = [sequence.adapter for sequence in self.rows]
        with mlx_adapter.row_adapters(adapters):
            return self._model(tokens, cache=self._cache, **moved)

    def _record(self, row: Sequence, hidden: mx.array | None) -> None:
        """Give the drafter the states (tokens, any) of a pass over tokens of `row` behind its KV."""
        if hidden is not None and isinstance(self._drafts, DrafterRows) and row in self._speculators:
            self._drafts.record(row, row.kv.length, hidden)

    def _record_prompt(self, row: Sequence) -> None:
        """Give the drafter the states of the passes over a prompt's end."""
        (end, hidden), row.kv.hidden = row.kv.hidden or (0, None), None
        if hidden is not None and isinstance(self._drafts, DrafterRows) and row in self._speculators:
            self._drafts.record(row, end - hidden.shape[1], hidden[0])

    def _read(self, inputs: mx.array | None, unread: list[bool]) -> list[Draw]:
        """Wait for the tokens of the step before; what guesses and grammars know is then up to them."""
        if inputs is None or not any(unread):
            return []
        tokens, turn = cast(list[int], inputs.tolist()), self._turn
        samplers, logprobs = self._logprobs  # Rows may have left since, or joined.
        likely = dict(zip(map(id, samplers), likelihoods(samplers, logprobs), strict=True))
        draws: list[Draw] = []
        for row, token, new in zip(self.rows, tokens, unread, strict=True):
            if new:
                draws.append((row, token, likely.get(id(row.sampling))))
                _advance(row, token)
        if turn is not None and not self._last.rest:  # The next turn proposes, and a step is on its way.
            began = clock()
            for row, token, _ in draws:
                speculator = self._speculators[row]
                speculator.add_tokens([*row.tokens[len(speculator.tokens) :], token])
            turn.propose_s += clock() - began
        return draws


def _held(guesses: Seq[int], drawn: Seq[int], ends: Container[int]) -> int:
    """How many of the guesses were drawn, up to one that ends the answer."""
    for index, guess in enumerate(guesses):
        if drawn[index] != guess or guess in ends:
            return index
    return len(guesses)


def _advance(sequence: Sequence, token: int) -> None:
    """Advance a row's constraint by its newest token, which may end the row; if it fails, so does the row."""
    constraint = sequence.sampling.constraint
    if constraint is None or token == NO_TOKEN:
        return
    constraint.advance(token)
    if constraint.news:
        log.warning("%s: %s", sequence.name, constraint.news)
        constraint.news = ""
    if constraint.ends_at is not None:
        sequence.sampling.max_new = min(sequence.sampling.max_new, constraint.ends_at)
    if constraint.error is not None and not sequence.cancelled:
        sequence.sink.failed(sequence, constraint.error)
        sequence.cancelled = True


def best_batch(batches: Seq[DecodeBatch], sequence: Sequence, loaded: LoadedModel) -> DecodeBatch | None:
    """The batch whose step grows least in bytes read by taking the sequence in; None: a new one grows less.

    A step reads the weights once and every row padded to the longest, but for rows that keep arrays of their
    own. Joining a batch of much longer or shorter rows can cost more than a pass of its own (facts: 219 ms
    against 115).
    """
    if not loaded.batchable:
        return None
    per_token = loaded.layout.nbytes(1) if loaded.layout else 0
    own_rows = mlx_adapter.has_own_rows(loaded.model)
    backend = mlx_adapter.attention_backend()

    def kv_cost(lengths: list[int]) -> float:
        if own_rows and backend.rows_pay_for(lengths, True):
            return sum(lengths) * per_token
        longest = max(lengths)
        uneven = min(lengths) < longest
        return len(lengths) * longest * per_token * (backend.masked_cost if uneven else 1.0)

    best, best_cost = None, loaded.weight_bytes + kv_cost([sequence.kv.length])
    for batch in batches:
        if not mlx_adapter.may_share_pass([sequence.adapter, *(row.adapter for row in batch.rows)]):
            continue
        lengths = [row.kv.length for row in batch.rows]
        cost = kv_cost([*lengths, sequence.kv.length]) - kv_cost(lengths)
        if cost <= best_cost:
            best, best_cost = batch, cost
    return best
