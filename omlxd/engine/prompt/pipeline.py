"""Turns a conversation into the model's tokens, on any thread but the engine's.

Three steps, kept apart: template/template.py applies the template, splice.py puts turns back as
they were generated, token_cache.py tokenises.

`tool_choice: none` keeps the tools in the prompt, as vLLM does by default: leaving them out would
change the head of the prompt and lose the cached prefix. Calls are then not looked for, so one that
the model writes all the same is text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...chat import EFFORTS, Conversation, ImagePart, RawPrompt, TextPart, media_of
from ...errors import InvalidRequest, ModelError, PromptTooLong, bad_field
from .canonical import Digest, answer_of, chain_of, opening
from .splice import Splicer
from .template.template import Renderer, Text
from .token_cache import TokenCache
from .tool_defaults import ToolDefaults
from .turn_memory import REASONS, Answer, Place, PrefixDigest, Scope, Turn, TurnMemory
from .turn_store import TurnFiles

HOIST_BY_ITSELF = True
"""Meaning of `--hoist-system auto`. Claude Code sends the folder, the tools it may load and the date as a
system message behind the first question. Prompt tokens that no earlier prompt had, over three recorded traces
one after the other (`tools/replay.py --offline`, the demo's tokenizer):

    trace                                prompt    in place    hoisted
    one session, continued              436,536      54,696     54,696
    two new sessions after it           125,076      34,184     29,618
    a session with sub-agents after it  105,864      20,601     16,035

A new session in the same folder computes 424 tokens for its first answer instead of 4,990."""

EFFORT_TOKENS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24_576, "xhigh": 32_768}
"""Budgets for words of effort, where a template has no place for them: low to high are those of Google's
OpenAI endpoint, the others what proxies use beside these. Any other word sets none."""


@dataclass(slots=True, frozen=True)
class RenderedPrompt:
    """A prompt's tokens for the model, and how to read the answer.

    tokens              the model's token ids
    text                what they were made of, turns as the client sent them; "" when it gave ids
    starts_in_thinking  the answer begins inside a thinking block
    begins_openly  it does not, as far as the template tells; the model may all the same
    reasoning           thinking tags in the answer are read (not so for a raw prompt)
    thinking_budget     tokens of thought at most; None: any number
    tool_calls          calls in the answer are looked for
    place               where the answer will stand; None: it is not remembered
    session             name of the conversation, its own or one made of its first messages; cache salt
    chain               canonical digests of the conversation's beginnings (canonical.py)
    spliced, refused    turns put back as they were generated; reasons why others were not
    unknown             turns at places without an entry
    turns               places of those that have one
    exposed             somebody's control tokens are read as control tokens
    images              in the order of their placeholders in `tokens`
    generated           (start, stop) of tokens that the model said: what looks there as a placeholder is none
    """

    tokens: list[int]
    text: str = ""
    starts_in_thinking: bool = False
    begins_openly: bool = False
    reasoning: bool = False
    thinking_budget: int | None = None
    tool_calls: bool = False
    place: Place | None = None
    session: tuple[str, str] = ("", "")
    chain: tuple[Digest, ...] = ()
    spliced: int = 0
    refused: tuple[str, ...] = ()
    unknown: int = 0
    turns: tuple[Place, ...] = ()
    exposed: bool = False
    images: tuple[ImagePart, ...] = ()
    generated: tuple[tuple[int, int], ...] = ()


class PromptPipeline:
    """Renders prompts for one tokenizer (mlx-lm's TokenizerWrapper). Thread-safe.

    traits  what its template takes
    notes   sentences for the load log: what is rendered in another way than the client sent it
    memory  turns as they were generated; None: `--no-healing`
    files   where they are kept beyond this process; None: nowhere
    read_documents  makes a conversation's documents text or images
    images  the model takes images
    starts_in_thinking  answers begin inside a thinking block that the template does not open

    Raises ModelError where a tokenizer without thinking tags is to start in thinking.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        turn_memory: bool = True,
        hoist_system: str = "auto",
        files: TurnFiles | None = None,
        read_documents: Callable[[Conversation], Conversation] = lambda conversation: conversation,
        images: bool = False,
        starts_in_thinking: bool = False,
    ):
        if starts_in_thinking and not tokenizer.think_start:
            raise ModelError("starts-in-thinking: this model has no thinking tags; take the setting away")
        self._starts_in_thinking = starts_in_thinking
        self._tokenizer = tokenizer
        self._read_documents = read_documents
        self.tokens = TokenCache(tokenizer)
        hoist = HOIST_BY_ITSELF if hoist_system == "auto" else hoist_system == "always"
        self.renderer = Renderer(tokenizer, cuttable=self.tokens.joins, hoist=hoist, images=images)
        self._splicer = Splicer(self.renderer, self.tokens, tokenizer)
        self.memory = TurnMemory(files=files) if turn_memory else None
        self._files = files
        self.traits = self.renderer.traits
        self.notes = self.renderer.notes()
        if turn_memory and not self._splicer.able:
            self.notes.append(
                "earlier turns can't be put back as they were generated: no end of a turn found"
            )

    def render(
        self,
        prompt: Conversation | RawPrompt,
        *,
        scope: Scope | None = None,
        most: int | None = None,
        refuse: int | None = None,
    ) -> RenderedPrompt:
        """Return the tokens of `prompt`. Raises InvalidRequest and PromptTooLong.

        scope   whose turns are put back as they were generated; None: nobody's
        most    tokens that a prompt with such turns may have
        refuse  a text that surely has more tokens is refused, before all of it has been read
        """
        if refuse is not None:
            self.tokens.bound.token_bytes.check(prompt, refuse)
        if isinstance(prompt, RawPrompt):
            return self._raw(prompt, refuse)
        chain = tuple(chain_of(prompt)) if scope else ()
        self._check_effort(prompt)
        prompt = self._read_documents(prompt)
        text = self.renderer.text(prompt)
        if refuse is not None:
            self.tokens.bound.token_bytes.check_texts([text.plain], refuse)
        in_thought = self._begins_with_thought(prompt, text.plain)
        rendered = RenderedPrompt(
            tokens=self._encode(text, refuse),
            text=text.plain,
            starts_in_thinking=in_thought,
            begins_openly=not (in_thought or prompt.continue_final or self._is_thought_over(text.plain)),
            reasoning=True,
            thinking_budget=self._thinking_budget(prompt),
            tool_calls=bool(prompt.tools) and prompt.tool_choice != "none",
            exposed=text.exposed,
            images=tuple(part for part in media_of(prompt.messages) if isinstance(part, ImagePart)),
        )
        if scope is None:
            return rendered
        session = scope.session or f"implicit-{chain[opening(prompt.messages)].hex()}"
        rendered = replace(rendered, chain=chain, session=(session, scope.salt))
        if self.memory is None or not self._splicer.able:
            return rendered
        return self._spliced(prompt, text, rendered, self.memory, not scope.session, most)

    def _begins_with_thought(self, prompt: Conversation, text: str) -> bool:
        start, end = self._tokenizer.think_start, self._tokenizer.think_end
        if start and text.rstrip().endswith(start):
            return True
        if start and prompt.continue_final:
            begun = "".join(part.text for part in prompt.messages[-1].parts if isinstance(part, TextPart))
            return begun.lstrip().startswith(start) and text.rfind(start) > text.rfind(end)
        return self._starts_in_thinking and prompt.thinking is not False

    def _thinking_budget(self, prompt: Conversation) -> int | None:
        if prompt.thinking is False:
            return 0  # Templates without a word for it open a thought all the same.
        effort = prompt.effort or prompt.template_args.get("reasoning_effort")
        unread = isinstance(effort, str) and not self.renderer.reads("reasoning_effort")
        budgets = (prompt.thinking_budget, EFFORT_TOKENS.get(str(effort).lower()) if unread else None)
        return min((budget for budget in budgets if budget is not None), default=None)

    def _check_effort(self, prompt: Conversation) -> None:
        """Raise InvalidRequest for a word that nobody knows: neither omlxd nor the template's code."""
        if prompt.effort_param and not self.renderer.reads(prompt.effort):
            raise bad_field(prompt.effort_param, f"{prompt.effort!r} is none of {', '.join(EFFORTS)}")

    def _is_thought_over(self, text: str) -> bool:
        end = self._tokenizer.think_end
        return not end or text.rstrip().endswith(end)

    def labels(self, rendered: RenderedPrompt, texts: Sequence[str], context: int) -> list[list[int]]:
        """Return the tokens of a client's answers `texts`. Raises InvalidRequest and PromptTooLong."""
        if texts and rendered.starts_in_thinking:
            raise InvalidRequest("the model's template begins with thinking; give the prompt as text instead")
        special = {*self._tokenizer.eos_token_ids, *self._tokenizer.all_special_ids}
        labels: list[list[int]] = []
        for index, text in enumerate(texts):
            param = f"labels.{index}"
            labels.append(tokens := self._continuation(rendered, text))
            if not text:
                raise InvalidRequest("an empty text has no probability", param=param)
            if not tokens or not special.isdisjoint(tokens):
                raise InvalidRequest(f"{text[:200]!r} is no text that the model could answer", param=param)
            if len(rendered.tokens) + len(tokens) > context:
                raise PromptTooLong(len(rendered.tokens) + len(tokens), context)
        return labels

    def _continuation(self, rendered: RenderedPrompt, text: str) -> list[int]:
        """Return the ids of `text` where it follows the prompt; no token spans the two."""
        length = len(rendered.tokens)
        if rendered.text:
            special = not (rendered.reasoning and self.renderer.has_template)
            both = self.tokens.encode(rendered.text + text, special=special)
            if both[:length] == rendered.tokens:
                return both[length:]
        return self.tokens.encode(text)

    def begin(self, rendered: RenderedPrompt) -> None:
        """Begin an answer; `end` must follow. The prompt's turns are counted, and recent from now on."""
        if rendered.place is not None and self.memory is not None:
            self.memory.used(rendered.turns)
            self.memory.count(rendered.spliced, rendered.refused, rendered.unknown)
            self.memory.begin(rendered.place)

    def end(self, place: Place | None) -> None:
        """End an answer, given or not."""
        if place is not None and self.memory is not None:
            self.memory.end(place)

    def learn(self, place: Place | None, answer: Answer, tokens: list[int], generated: list[int]) -> None:
        """Remember a turn: `generated` after the prompt's `tokens`; the client got `answer`."""
        if place is not None and self.memory is not None:
            self.memory.remember(place, answer.digest(place.defaults), answer.thought, tokens, generated)

    def figures(self) -> dict[str, float]:
        """Return the counters; those of correctness are zero on clean traffic."""
        values: dict[str, float] = {
            "prompt_tokens_remembered_total": self.tokens.hits,
            "prompt_tokens_tokenised_total": self.tokens.misses,
        }
        if self.memory is not None:
            values["prompt_turns_healed_total"] = self.memory.spliced
            for reason in REASONS:
                values[f"prompt_turns_not_healed_{reason}_total"] = self.memory.refusals[reason]
            values["prompt_turns_unknown_total"] = self.memory.unknown
            if self._files is not None:
                values |= self._files.figures()
        return values

    def _encode(self, text: Text, most: int | None) -> list[int]:
        if text.sentinel:
            return self._splicer.encode(text.text, text.sentinel, most)
        # A template has written itself what the tokenizer puts around a text.
        return self.tokens.encode(text.plain, special=not self.renderer.has_template, most=most)

    def _raw(self, prompt: RawPrompt, refuse: int | None) -> RenderedPrompt:
        if prompt.tokens is not None:
            return RenderedPrompt(tokens=list(prompt.tokens))
        tokens = self.tokens.encode(prompt.text, special=True, most=refuse)
        return RenderedPrompt(tokens=tokens, text=prompt.text)

    # ----------------------------------------------------------------- spliced turns

    def _spliced(
        self,
        prompt: Conversation,
        text: Text,
        rendered: RenderedPrompt,
        memory: TurnMemory,
        implicit: bool,
        most: int | None,
    ) -> RenderedPrompt:
        """Return `rendered` with turns as they were generated, where they differ."""
        defaults = ToolDefaults((*prompt.tools, *prompt.later_tools))
        places = [Place(rendered.session, before, implicit, defaults) for before in rendered.chain]
        turns, refused = _turns(prompt, places, memory)
        if prompt.continue_final:  # What will be generated is no turn.
            turns.pop(len(prompt.messages) - 1, None)
        unknown = refused.count("")
        refused = [reason for reason in refused if reason]
        spliceable = tuple(places[index] for index in turns)
        place = None if prompt.continue_final else places[-1]
        rendered = replace(rendered, place=place, turns=spliceable, unknown=unknown)
        if turns and not _begins_with(rendered.tokens, turns[max(turns)]):
            spliced = self._splicer.splice(prompt, text, turns)
            refused += spliced.refused
            if most is not None and len(spliced.tokens) > most:
                refused.append("too_long")
            elif spliced.turns:
                rendered = replace(
                    rendered,
                    tokens=spliced.tokens,
                    spliced=len(spliced.turns),
                    generated=tuple(spliced.turns),
                )
        return replace(rendered, refused=tuple(refused))


def _turns(
    prompt: Conversation, places: list[Place], memory: TurnMemory
) -> tuple[dict[int, Turn], list[str]]:
    """Return (message index → the turn at its place, reasons why others are not put back; "": unknown)."""
    roles = [message.role for message in prompt.messages]
    turns: dict[int, Turn] = {}
    refused: list[str] = []
    for index, role in enumerate(roles):
        # Two in a row may be joined, so neither is a turn.
        beside = (*roles[max(index - 1, 0) : index], *roles[index + 1 : index + 2])
        if role != "assistant" or "assistant" in beside:
            continue
        turn = memory.find(places[index], *answer_of(prompt.messages[index], places[index].defaults))
        if isinstance(turn, Turn):
            turns[index] = turn
        else:
            refused.append(turn)
    return turns, refused


def _begins_with(tokens: list[int], turn: Turn) -> bool:
    """Return whether `tokens` begin with the turn and all before it."""
    return len(tokens) > turn.length and PrefixDigest(tokens[: turn.length]).value == turn.prompt_and_turn
