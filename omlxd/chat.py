"""The conversation form and the event stream: what crosses between front and engine.

Each HTTP protocol translates into `GenerateRequest` and out of `Event`; the engine knows no protocol and a
protocol no model. The structs are also the wire format (`wire/`) and the bridge's JSON Lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Struct(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every struct here: immutable, defaults left off the wire."""


# --------------------------------------------------------------------------- parts of a message


class TextPart(Struct, frozen=True, tag="text"):
    text: str


class ThinkingPart(Struct, frozen=True, tag="thinking"):
    """Reasoning of an earlier assistant turn, echoed by the client. `signature` may be empty."""

    text: str
    signature: str = ""


class ImagePart(Struct, frozen=True, tag="image"):
    """An image as encoded bytes (PNG, JPEG, …); never a URL: nobody past the front fetches anything.

    param  where it stood in the request, for errors: `messages.3.content.1`
    page   `data` is a PDF, and the image its page of this number, from 1; 0: `data` is an image
    name   of that PDF, for errors
    side   pixels that its longer side may have; 0: no bound of the client's
    """

    data: bytes
    media_type: str = ""
    param: str = ""
    page: int = 0
    side: int = 0
    name: str = ""


class DocumentPart(Struct, frozen=True, tag="document"):
    """A document that is no text; the engine makes it text, or images if its model sees.

    media_type  `application/pdf`: no other is read
    name        its title or file name, which the model reads
    context     what the client says of it, likewise
    param       as of an ImagePart
    """

    data: bytes
    media_type: str
    name: str = ""
    context: str = ""
    param: str = ""


class ToolCallPart(Struct, frozen=True, tag="tool_call"):
    """A call that the assistant made in an earlier turn. `arguments` is a JSON object as parsed."""

    id: str
    name: str
    arguments: dict[str, Any]


class ToolResultPart(Struct, frozen=True, tag="tool_result"):
    """The result of a tool call. Stands in messages whose role is `tool`."""

    call_id: str
    text: str
    is_error: bool = False
    images: tuple[ImagePart, ...] = ()
    documents: tuple[DocumentPart, ...] = ()


Part = Union[TextPart, ThinkingPart, ImagePart, DocumentPart, ToolCallPart, ToolResultPart]


class Message(Struct, frozen=True):
    """One message, its parts in the client's order.

    `system` may stand anywhere (Claude Code sends it after user turns); the prompt pipeline adapts it.
    """

    role: Role
    parts: tuple[Part, ...]


class Tool(Struct, frozen=True):
    """A tool that the model may call. `parameters` is a JSON schema.

    strict         a call's arguments follow the schema, or the request is refused
    input_grammar  of its one parameter, the text `input`, in Lark's syntax; "": any text
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    input_grammar: str = ""


# --------------------------------------------------------------------------- a request


class AnswerFormat(Struct, frozen=True):
    """What the answer must be, enforced while it is generated. Thinking before it is free.

    json    `schema` is a JSON schema; choice: one of `choices`
    regex   `text` matches the answer
    lark    `text` is a grammar, with a rule `start`
    param   the request's field that asks for it
    strict  a schema that can't be enforced as a whole is refused
    """

    kind: Literal["json", "regex", "lark", "choice"]
    schema: dict[str, Any] = {}
    text: str = ""
    choices: tuple[str, ...] = ()
    param: str = "response_format"
    strict: bool = False


class Sampling(Struct, frozen=True):
    """How to sample. `None` means: the model's own default (generation_config.json), else the field's.

    temperature  >= 0; 0 is greedy
    top_p        in (0, 1]
    top_k        0 is off
    min_p        in [0, 1)
    repetition_penalty  > 0; 1 is off. Taken over prompt and output, as Hugging Face and vLLM do.
    repetition_context_size  newest tokens that the repetition penalty sees; 0: all
    presence_penalty, frequency_penalty  in [-2, 2]; over the output, as OpenAI does
    logit_bias   token id → bias in [-100, 100]
    seed         the same seed, prompt and build give the same tokens, whatever else runs
    max_tokens   None: `usual_max_tokens`; 0: the prompt is computed, and nothing is answered
    usual_max_tokens  the protocol's own; None: until the context is full
    stop         strings; matched on the text, whatever its tokenisation
    stop_token_ids  end the answer as the model's own end of a turn does
    min_tokens   no end of a turn, stop token or stop string before so many tokens
    ignore_eos   the model's own end of a turn ends nothing
    shows_special  text of special tokens is text of the answer
    shows_stop   the stop string or stop token that ends the answer is the end of its text
    logprobs     number of top alternatives to report a token; None is off
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    usual_max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    shows_special: bool = False
    shows_stop: bool = False
    logprobs: int | None = None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words for how hard to think."""


class Conversation(Struct, frozen=True, tag="conversation"):
    """A chat, rendered by the model's template. `thinking` None: the model's default."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or `named:<tool>`, which is one call of it."""
    allowed_tools: tuple[str, ...] = ()
    """Names of the tools that may be called, with `auto` and `required`; the prompt lists all. Empty: all."""
    later_tools: tuple[Tool, ...] = ()
    """Tools that messages describe where they come up; the prompt does not list them."""
    parallel_calls: bool = True
    """False: the answer ends with its first call."""
    thinking: bool | None = None
    template_args: dict[str, Any] = {}
    effort: str = ""
    """How hard to think: for the template where it has a word for it (`reasoning_effort`), else a budget."""
    effort_param: str = ""
    """The field of an `effort` that must be a word of the template, as omlxd does not know it; else ""."""
    thinking_budget: int | None = None
    """Tokens of thought at most; None: as many as the model likes."""
    continue_final: bool = False
    """The last message is the assistant's, and its text the beginning of the answer."""

    @property
    def one_call(self) -> bool:
        """Whether the answer ends with its first call."""
        return not self.parallel_calls or self.tool_choice.startswith("named:")

    @property
    def must_call(self) -> bool:
        """Whether the answer is nothing but calls."""
        return self.tool_choice == "required" or self.tool_choice.startswith("named:")


class RawPrompt(Struct, frozen=True, tag="raw"):
    """A text or token ids to complete as they are, with no template."""

    text: str = ""
    tokens: tuple[int, ...] | None = None
    echo: bool = False


PriorityWord = Literal["interactive", "background"]
PRIORITIES: dict[PriorityWord, int] = {"interactive": 0, "background": 1}
"""Words for priorities, which headers and keys have. Any number above 0 waits for what has none."""


class GenerateRequest(Struct, frozen=True):
    """What the front asks of an engine.

    parent_agent  the agent that started this one; "" is the session's own. Its `session` is `name/agent`
    client      whose it is, for fairness: the name of its key, else its address; "": nobody's
    session     the client's conversation, for affinity and diagnostics; never part of a key
    priority    a request of a lower number goes first (vLLM's meaning); `PRIORITIES` has words
    cache_salt  keeps this request's KV apart from everybody else's: part of the chain hash
    timeout_s   seconds from receipt, below the engine's own; 0: the engine's own
    context_limit  tokens of prompt and answer at most; 0: the model's own
    format      what the answer must be; None: anything
    labels      answers whose likelihood is asked for, and nothing is generated; (): the model's own
    loop_stop   an answer that repeats itself without end is ended
    hides_thinking  the client wants no text of thoughts
    prediction  text that the client predicts: the engine guesses tokens from it, too; "": none
    collected   the client reads nothing before the end, so after an engine's death the answer may begin anew,
                with `Restarted`; so may one that the engine understood too late
    return_token_ids  `TokenIds` come with the answer
    keys_file, values  a safetensors file that the prompt's keys are written to, its values too; "": none
    query       position in the prompt whose attention is written there too; negative: from the end
    import_file  a prompt-cache file of mlx-lm, which holds the KV of the first tokens of `prompt`: these
                alone are the prompt; "": none
    export_to   one that the prompt's KV is written to; "": none
    name        the request's id in the access log, for the engine's lines; "": it has none
    again       another answer to a prompt of the same client's request: counters of prompts have it already
    asked       when its client asked, of `time.monotonic`, which is the same in all processes; 0: when the
                engine has its tokens
    """

    prompt: Union[Conversation, RawPrompt]
    sampling: Sampling = Sampling()
    client: str = ""
    session: str = ""
    priority: int = 0
    parent_agent: str = ""
    cache_salt: str = ""
    context_limit: int = 0
    timeout_s: float = 0.0
    format: AnswerFormat | None = None
    labels: tuple[str, ...] = ()
    loop_stop: bool = True
    hides_thinking: bool = False
    prediction: str = ""
    collected: bool = False
    return_token_ids: bool = False
    keys_file: str = ""
    values: bool = False
    query: int | None = None
    import_file: str = ""
    export_to: str = ""
    name: str = ""
    again: bool = False
    asked: float = 0.0


class EmbedRequest(Struct, frozen=True):
    """Texts of which vectors are wanted, or a score each as an answer to `query`.

    texts, tokens  one of both: texts, or their token ids
    dimensions     numbers of a vector that are kept; 0: all
    truncate       a text that is too long is cut; else it is an error
    client         as GenerateRequest's
    """

    texts: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    query: str | None = None
    dimensions: int = 0
    truncate: bool = False
    client: str = ""


class Vectors(Struct, frozen=True):
    """float32 in little-endian, a row of `width` numbers a text. `tokens`: of all texts."""

    values: bytes
    width: int
    tokens: int


def media_of(messages: Iterable[Message]) -> Iterator[ImagePart | DocumentPart]:
    """Yield the images and documents of `messages`, those of tool results too."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, ImagePart | DocumentPart):
                yield part
            elif isinstance(part, ToolResultPart):
                yield from part.images
                yield from part.documents


def first_image(prompt: Conversation | RawPrompt) -> ImagePart | None:
    parts = media_of(prompt.messages) if isinstance(prompt, Conversation) else ()
    return next((part for part in parts if isinstance(part, ImagePart)), None)


def plain_texts(prompt: Conversation | RawPrompt) -> list[str]:
    """Texts that every template writes as they are, but for blanks at their ends."""
    if isinstance(prompt, RawPrompt):
        return [prompt.text]
    parts = (part for message in prompt.messages for part in message.parts)
    texts = (part.text for part in parts if isinstance(part, TextPart | ToolResultPart))
    return [text for text in texts if "</think>" not in text]


# --------------------------------------------------------------------------- events


class Limited(Struct, frozen=True):
    """What an answer was held to, what ended it before the model did, and how it stood in line.

    not_enforced     keywords of the request's schemas that it or its calls were not held to
    reasoning_ended  what ended its reasoning: "budget", or "repetition" without end; "": the model
    answer_ended     "repetition": that ended the answer; "": anything else
    repeated_tokens  tokens that were repeated there
    priority, side_request  of its request (engine/schedule/waiting/priority.py)
    """

    not_enforced: tuple[str, ...] = ()
    reasoning_ended: str = ""
    answer_ended: str = ""
    repeated_tokens: int = 0
    priority: int = 0
    side_request: bool = False

    @property
    def tells(self) -> bool:
        """Whether anything held it or ended it."""
        return bool(self.not_enforced or self.reasoning_ended or self.answer_ended)


class Usage(Struct, frozen=True):
    """Token counts of one request, in the model's own tokens.

    cached_hot/_cold   of the prompt, restored from RAM / from SSD; the rest was computed
    recomputed         of that rest, what lay on SSD: computing it was faster, or a file was damaged
    left_over          of that rest, what was not computed, as the request's time ran out before
    completion_tokens  generated, the end-of-turn token among them, as vLLM counts
    reasoning_tokens   of these, inside the thinking block
    ttft_s             seconds from `GenerateRequest.asked` to the first token
    queue_s, restore_s, prefill_s  of these: waiting (for a load, a slot, its turn, a prefix that another
                       request computes), on the cached prefix, in the passes over the rest
    decode_s           seconds from the first token to the end; of several choices, from the first token of
                       any to the end of the last
    peak_bytes         most that MLX held in its passes, all that was in memory beside it included
    drafted, accepted  tokens that were guessed, and guesses that held; `drafted` has all guesses of the last
                       pass, where a stop string may have ended the answer
    model_drafted, model_accepted  of these, the draft model's
    predicted, predicted_accepted  of these, those that come from the request's prediction
    """

    prompt_tokens: int = 0
    cached_hot: int = 0
    cached_cold: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    ttft_s: float = 0.0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    peak_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    recomputed: int = 0
    left_over: int = 0
    limited: Limited = Limited()

    @property
    def cached_tokens(self) -> int:
        return self.cached_hot + self.cached_cold

    @property
    def computed_tokens(self) -> int:
        """Of the prompt."""
        return self.prompt_tokens - self.cached_tokens - self.left_over

    @property
    def tokens_per_s(self) -> float:
        """Of decoding, without the first token; 0: too few."""
        timed = self.completion_tokens > 1 and self.decode_s
        return (self.completion_tokens - 1) / self.decode_s if timed else 0.0


class TokenLogprob(Struct, frozen=True):
    """A token of the answer: log-softmax of the model's raw logits, before temperature and filters.

    token    its text; U+FFFD for bytes that are no complete character: `raw` has them then
    at       characters of the answer before it
    top      the likeliest tokens and their values, best first; top_raw: of each, as `raw`
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    raw: bytes = b""
    at: int = 0
    top_raw: tuple[bytes, ...] = ()


class TokenIds(Struct, frozen=True, tag="token_ids"):
    """Tokens as they are generated, thinking and calls too, but not the end of the turn; the text follows.

    prompt  the prompt's tokens, in the first event of a request
    """

    ids: tuple[int, ...]
    prompt: tuple[int, ...] = ()


class Progress(Struct, frozen=True, tag="progress"):
    """Prefill has reached `done` of `total` prompt tokens. The first one carries the restored prefix.

    restore_s, prefill_s  as Usage has them, so far
    cold  of the first one: tokens that came from SSD
    """

    done: int
    total: int
    restore_s: float = 0.0
    prefill_s: float = 0.0
    cold: int = 0


class ReasoningDelta(Struct, frozen=True, tag="reasoning"):
    """`pieces`: as `TextDelta` has them."""

    text: str
    pieces: int = 1


class TextDelta(Struct, frozen=True, tag="text"):
    """Text of the answer.

    logprobs  only when asked for
    pieces    tokens, but for text that was held back
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    pieces: int = 1


class ToolCallDelta(Struct, frozen=True, tag="tool_call_delta"):
    """A piece of a call's arguments, while the model still writes them.

    Pieces joined are the beginning of the `arguments` of the ToolCall or ToolCallCut with the same id. That
    follows in any case, and nothing else before it.
    """

    id: str
    name: str
    text: str


class ToolCall(Struct, frozen=True, tag="tool_call"):
    """One whole call. `arguments` is JSON text, an object, valid."""

    id: str
    name: str
    arguments: str

    @property
    def valid_arguments(self) -> str:
        return self.arguments


class ToolCallCut(Struct, frozen=True, tag="tool_call_cut"):
    """A call that never became whole though pieces of it were sent: cut off, or broken off by the model.

    arguments  as far as they go: the beginning of a JSON object
    valid_arguments  its complete members, as JSON text of an object
    """

    id: str
    name: str
    arguments: str
    valid_arguments: str


class Scored(Struct, frozen=True, tag="scored"):
    """How likely the labels of a request are as its answer, in their order.

    logprobs   of each label's tokens, as of a TokenLogprob
    logits     of each label's first token, before the softmax
    likeliest  the token that the answer would begin with, and others as `Sampling.logprobs` asks
    """

    logprobs: tuple[tuple[float, ...], ...]
    logits: tuple[float, ...]
    likeliest: TokenLogprob


class Restarted(Struct, frozen=True, tag="restarted"):
    """The answer begins anew: its events so far do not count. Only a `collected` one does.

    Made in the front where an engine died; an engine sends it where a thought turned out to be one too late.
    """


FinishReason = Literal["stop", "stop_sequence", "length", "tool_calls"]


class Finished(Struct, frozen=True, tag="finished"):
    """The last event of a request that went well."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None


ErrorCode = Literal[
    "invalid_request",  # 400: the client can mend it
    "prompt_too_long",  # 400: message is `prompt is too long: X tokens > Y maximum`
    "authentication",  # 401
    "not_found",  # 404
    "request_too_large",  # 413: bytes, not tokens
    "model_unusable",  # 400: its files or settings; asking again changes nothing
    "overloaded",  # 503 (529 for Anthropic): retry after a while
    "unavailable",  # 503: the engine died or is reloading; retry
    "internal",  # 500: a bug of ours
]


class Failed(Struct, frozen=True, tag="failed"):
    """The last event of a request that failed.

    retry_after  seconds, at most 60
    param        the request's field at fault, if one is
    """

    code: ErrorCode
    message: str
    retry_after: int | None = None
    param: str | None = None


AnswerEvent = Union[
    Union[TokenIds, ReasoningDelta, TextDelta, ToolCallDelta, ToolCall, ToolCallCut],
    Union[Scored, Restarted, Finished, Failed],
]
"""An event of one answer."""


class ChoiceEvent(Struct, frozen=True, tag="choice"):
    """An event of one of several answers, numbered from 0. Made in the front; no engine sends it.

    Failed: the prompt of this answer can't be served, and the others go on.
    """

    index: int
    event: AnswerEvent


Event = Union[AnswerEvent, Progress, ChoiceEvent]
