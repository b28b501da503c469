"""Conversations with a prompt pipeline and a model that says what it is told, for tests of healing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from templates import DEEPSEEK, QWEN3, QWEN3_THINKING

from omlxd.chat import Conversation, Message, TextPart, ThinkingPart, Tool, ToolCallPart, ToolResultPart
from omlxd.engine.output.parser import OutputParser
from omlxd.engine.prompt.pipeline import PromptPipeline, RenderedPrompt
from omlxd.engine.prompt.turn_memory import Answer, Scope
from omlxd.engine.prompt.turn_store import TurnFiles
from omlxd.models import demo

READ = Tool("Read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
ME = Scope("session-1")
CALL = '<tool_call>\n{"name":"Read",  "arguments": {"path": "a.txt", "lines": 2.0}}\n</tool_call>'


def tokenizer_folder(path: Path) -> Path:
    """Makes the demo's tokenizer in `path`."""
    demo.write_tokenizer(path, demo.VOCAB)
    demo.write_json(path / "config.json", {"model_type": "qwen3", "eos_token_id": [2, 0]})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def pipeline(
    folder: Path,
    template: str,
    ends: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>"),
    files: TurnFiles | None = None,
) -> PromptPipeline:
    tokenizer = load_tokenizer(folder)
    tokenizer._tokenizer.chat_template = template
    tokenizer._eos_token_ids = {tokenizer.convert_tokens_to_ids(end) for end in ends}
    return PromptPipeline(tokenizer, files=files)


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def tool(text: str, id: str = "c1") -> Message:
    return Message("tool", (ToolResultPart(id, text),))


def echo(answer: Answer, thinking: bool = False) -> Message:
    """As a client that keeps no thinking sends it back, unless told so."""
    parts = [ThinkingPart("".join(answer.thoughts))] if thinking and answer.thoughts else []
    texts = [TextPart(f"{text} ") for text in answer.texts if text]
    calls = [ToolCallPart(f"id{i}", name, json.loads(a)) for i, (name, a) in enumerate(answer.calls)]
    return Message("assistant", (*parts, *texts, *calls))


class Session:
    """One conversation with a pipeline and a model that says what it is told, in tokens of its own."""

    def __init__(self, prompts: PromptPipeline, scope: Scope = ME, messages: tuple[Message, ...] = ()):
        self.prompts, self.scope = prompts, scope
        self.messages = messages or (Message("system", (TextPart("You are an agent."),)),)
        self.tools: tuple[Tool, ...] = (READ,)
        self.produced: list[int] = []
        """Tokens of the last prompt and of what was generated from it."""

    def ask(self, *messages: Message, thinking: bool | None = None) -> RenderedPrompt:
        self.messages += messages
        talk = Conversation(self.messages, tools=self.tools, thinking=thinking)
        self.rendered = self.prompts.render(talk, scope=self.scope)
        return self.rendered

    def generate(self, text: str, ended: bool = True) -> Answer:
        """`text` as the model's answer, letter by letter: no tokenizer would cut it so."""
        tokenizer = self.prompts._tokenizer
        generated: list[int] = []
        for piece in self.prompts.tokens._split(text):
            whole = tokenizer.encode(piece, add_special_tokens=False)
            special = (
                len(whole) and tokenizer.decode(whole[:1]).startswith("<") and whole[0] >= demo.VOCAB - 7
            )
            letters = piece.removeprefix(tokenizer.decode(whole[:1])) if special else piece
            generated += whole[:1] if special else []
            generated += [
                id for letter in letters for id in tokenizer.encode(letter, add_special_tokens=False)
            ]
        assert tokenizer.decode(generated) == text
        parser = OutputParser(tokenizer, self.tools, starts_in_thinking=self.rendered.starts_in_thinking)
        answer = Answer()
        events = [event for token in generated for event in parser.add_token(token)] + parser.finish("stop")
        for event in events:
            answer.add(event)
        self.prompts.begin(self.rendered)
        if ended:
            self.prompts.learn(self.rendered.place, answer, self.rendered.tokens, generated)
        self.prompts.end(self.rendered.place)
        self.produced = self.rendered.tokens + generated
        return answer

    def kept(self) -> bool:
        """Whether the last prompt begins with all that was there before it."""
        return self.rendered.tokens[: len(self.produced)] == self.produced


def thought(prompts: PromptPipeline, text: str) -> str:
    """An answer with thinking, from wherever the template's prompt to answer begins."""
    opened = prompts.render(Conversation((user("x"),))).starts_in_thinking
    return ("" if opened else "<think>\n") + "Let me  see.\n</think>\n\n" + text


ABLE = {"qwen3": QWEN3, "qwen3-thinking": QWEN3_THINKING, "deepseek": DEEPSEEK, "demo": demo.TEMPLATE}


@pytest.fixture(params=list(ABLE))
def prompts(request: pytest.FixtureRequest, folder: Path) -> PromptPipeline:
    """One for each template that healing works with."""
    return pipeline(folder, ABLE[request.param])
