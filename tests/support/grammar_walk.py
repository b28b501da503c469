"""Tokens drawn at random from what a grammar allows: what a model of noise would write under it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlxd.chat import Tool, ToolCall, ToolCallDelta
from omlxd.engine.constrain.constraint import Constraint
from omlxd.engine.output.parser import OutputParser

ODD = (
    *"\"'\\\n{}[](),:<>&é😀 ",
    *("-1", "12", "0.5", "1e", "true", "True", "null", "\\u0022", "name", "key", "]]>", "<![CDATA["),
    *("</tool_call>", "</parameter>", "</arg_value>", "</param>", "</function>", "</longcat_arg_value>"),
    *('<|"|>', "<tool_call|>", "<escape>", "<end_function_call>", "<|tool_call_end|>", ")]<|tool_call_end|>"),
    *("<|close|>argument<|sep|>", "<|open|>json<|sep|>", "</atem:parameter>", "</atem:function_calls>"),
    *("</minimax:tool_call>", "<|call|>", "<|end|>"),
)
"""Texts that a format may stumble over; tried again and again, wherever the grammar lets them stand."""
CLOSERS = (
    *('"', "}", "]", ")", "]]>", '<|"|>', "<escape>", "\n</parameter>", "</arg_value>", ">"),
    *("</longcat_arg_value>", "</parameter>", "</param>", "</atem:parameter>", "<|close|>argument<|sep|>"),
    *("<|close|>", "<|end|>", "<|call|>"),
)


class Walker:
    """Walks of one tokenizer. `odd`: texts to be tried; `closers`: those that bring it to an end."""

    def __init__(self, tokenizer: Any, odd: tuple[str, ...] = ODD, closers: tuple[str, ...] = CLOSERS):
        self._tokenizer = tokenizer
        self._ends = sorted(tokenizer.eos_token_ids)
        self._odd = [tokenizer.encode(text, add_special_tokens=False) for text in odd]
        self._closers = [tokenizer.encode(text, add_special_tokens=False) for text in closers]

    def walk(self, constraint: Constraint, seed: int, free: int = 60, limit: int = 1500) -> list[int] | None:
        """Tokens up to the turn's end: `free` of any kind, then what closes is preferred; None: cut off."""
        rng = np.random.default_rng(seed)
        tokens: list[int] = []

        def take(token: int) -> None:
            tokens.append(token)
            constraint.advance(token)
            assert constraint.error is None, constraint.error

        def may(token: int) -> bool:
            return constraint.mask is not None and bool(constraint.mask[token])

        while len(tokens) < limit:
            assert constraint.mask is not None and constraint.mask.any()
            if any(may(end) for end in self._ends) and (len(tokens) > free or rng.random() < 0.5):
                return tokens
            closing = len(tokens) > free
            choices = self._closers if closing else self._odd
            for index in rng.permutation(len(choices))[: len(choices) if closing else 3]:
                for token in choices[index]:
                    if not may(token):
                        break
                    take(token)
            if constraint.mask is None:
                return tokens
            allowed = np.nonzero(constraint.mask)[0]
            allowed = allowed[~np.isin(allowed, self._ends)] if len(allowed) > 1 else allowed
            if len(allowed):
                token = int(rng.choice(allowed))
                if token in self._ends:
                    return [*tokens, token]
                take(token)
        return None


def calls_in(tokenizer: TokenizerWrapper, tokens: list[int], tools: tuple[Tool, ...]) -> list[ToolCall]:
    """The calls of an answer that must hold nothing else, each checked against its tool's schema."""
    parser = OutputParser(tokenizer, tools=tools)
    events = [event for token in tokens for event in parser.add_token(token)] + parser.finish("stop")
    calls = [event for event in events if not isinstance(event, ToolCallDelta)]
    text = tokenizer.decode(tokens)
    assert calls and all(isinstance(event, ToolCall) for event in calls), (text, calls)
    found = [event for event in calls if isinstance(event, ToolCall)]
    for call in found:
        schema = next(tool.parameters for tool in tools if tool.name == call.name)
        try:
            jsonschema_rs.validate(schema, json.loads(call.arguments))
        except jsonschema_rs.ValidationError as error:
            raise AssertionError(f"{text!r} gave {call.arguments}: {error}") from error
    return found
