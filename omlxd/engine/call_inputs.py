"""Tools whose one parameter, `input`, is a text of a grammar, as grammars of their own."""

from __future__ import annotations

from ..chat import Tool
from ..errors import InvalidRequest
from .letter_grammar import LetterGrammar
from .value_grammar import plain

INPUT = "input"


def input_term(tool: Tool, inputs: dict[str, str], *, escaped: bool) -> str:
    """A term for the text; its grammar goes into `inputs`. Raises InvalidRequest.

    escaped  it stands in a JSON string
    """
    name = f"input_{len(inputs)}"
    try:
        inputs[name] = LetterGrammar(tool.input_grammar, escaped).lark
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"tools: the grammar of {tool.name!r} can't be enforced: {error}", param="tools"
        ) from error
    return f"@{name}"


def json_input(term: str) -> str:
    """A term for arguments that are that text alone."""
    return " ".join((plain('{"' + INPUT + '": "'), term, plain('"}')))
