"""Spellings of tool calls, as models' own templates teach them and mlx-lm's parsers read them."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .value_grammar import PYTHON_WORDS, ValueSyntax


@dataclass(slots=True, frozen=True)
class JsonCalls:
    """A format: `section`, calls of `before NAME between ARGUMENTS after` parted by `part`, `end`."""

    section: str
    before: str
    between: str
    after: str
    end: str
    part: str = ""
    quoted: bool = True
    """Whether the name stands in a JSON string."""
    never: tuple[str, ...] = ()
    """Texts that no string may hold: the parser looks for them first."""

    def head(self, name: str) -> str:
        """Return the text before a call's arguments, without the section."""
        return self.before + (json.dumps(name, ensure_ascii=False) if self.quoted else name) + self.between

    def named_head(self, name: str) -> str:
        """Return the beginning of `head` that tells the name from longer ones."""
        return self.head(name).removesuffix(self.between[1:])


@dataclass(slots=True, frozen=True)
class TagCalls:
    """A format: `before NAME named`, then for each parameter `key KEY keyed VALUE valued`, then `after`.

    close    ends bare text; `valued` is `close` after `pad`
    never    texts that no value holds: they would end the call
    section  precedes the first call; `end` follows the last, `tail` follows `close`
    typed    `keyed` has the value's type in place of `%s`
    cdata    begins and ends text that `plain` doesn't match
    """

    before: str
    named: str
    key: str
    keyed: str
    close: str
    after: str
    pad: str = ""
    tail: str = ""
    part: str = "\n"
    never: tuple[str, ...] = ()
    section: str = ""
    end: str = ""
    typed: bool = False
    plain: str = ""
    cdata: tuple[str, str] | None = None

    @property
    def reading(self) -> TagReading:
        return _reading(self)

    @property
    def inner(self) -> tuple[str, str]:
        """Beginning and end of a call within its outer tags."""
        return self.before.rpartition("\n")[2], self.after.partition("\n")[0]

    def head(self, name: str) -> str:
        """Return the text before a call's first parameter, without the section."""
        return self.before + (attribute(name) if self.typed else name) + self.named

    def named_head(self, name: str) -> str:
        """Return the beginning of a call that tells the name from longer ones."""
        return self.head(name) + ("" if self.named else self.key)


@dataclass(slots=True, frozen=True)
class TagReading:
    """Reads the text between a call's outer tags, with any space.

    begins     the text begins with one of these; empty: with `head`
    head       group 1: the tool's name
    parameter  group 1: its name; `data` or the last group: its value
    closing    how it ends
    quoted     names have quotes; such a text may hold several calls
    """

    begins: tuple[str, ...]
    head: re.Pattern[str]
    parameter: re.Pattern[str]
    closing: re.Pattern[str]
    end: re.Pattern[str]
    close: str
    pad: str
    quoted: bool

    def fits(self, text: str) -> bool:
        return text.startswith(self.begins) if self.begins else self.head.match(text) is not None

    def value(self, match: re.Match[str]) -> str:
        """Return a parameter's value without the newlines that belong to its tags."""
        value = match[match.lastindex or 2]
        if self.pad:
            return value.removeprefix(self.pad).removesuffix(self.pad)
        padded = self.quoted and len(value) > 1 and not match.groupdict().get("data")
        return value[1:-1] if padded and value.startswith("\n") and value.endswith("\n") else value


@functools.cache
def _reading(row: TagCalls) -> TagReading:
    opening, ending = row.inner
    quoted = row.key.endswith('"')
    begins = (opening.partition(" ")[0] + " " * quoted,) if row.named else ()
    last = '"' if quoted else ">" if row.named else "<"  # no name holds it
    if not row.named:  # the outer tags are the call's own
        head, end = rf"\s*([\w.:/-]+)\s*(?={row.key})", r"\s*$"
    else:
        head = rf"\s*{_loose(opening)}([^{last}]+){_loose(row.named.strip())}"
        end = rf"\s*{ending}"
        if row.cdata:  # the outer tags are part of the call's
            tag, quote = opening[:-1], opening[-1]
            begins = (*begins, quote)
            head = head.replace(_loose(opening), rf"(?:{_loose(tag)})?{quote}")
            end = rf"\s*(?:{ending}|$)"
    value = "(.*?)"
    if row.cdata:
        opens, closes = map(re.escape, row.cdata)
        value = rf"(?:\s*{opens}(?P<data>.*?){closes}\s*|(.*?))"
    closing = row.close
    if row.named:  # a tag in a value is part of it, unless one follows that goes on with the call
        closing += rf"\s*(?={_loose(row.key)}|{ending}{'|$' if row.cdata else ''})"
    parameter = rf"\s*{_loose(row.key)}([^{last}]*){_loose(row.keyed.strip())}{value}{closing}"
    return TagReading(
        begins,
        re.compile(head),
        re.compile(parameter, re.DOTALL),
        re.compile(closing),
        re.compile(end),
        row.close,
        row.pad,
        quoted,
    )


def _loose(tag: str) -> str:
    """Return a pattern for part of a tag, in which there may be other attributes and more space."""
    tag = re.escape(tag).replace("><", r">\s*<")
    tag = tag.replace(r'\ name="', r'\b[^>]*?\bname="')
    return re.sub(r'^">', r'"[^>]*>', tag)


@dataclass(slots=True, frozen=True)
class ValueCalls:
    """A format: `before NAME`, then `KEY VALUE` (in `python` `KEY=VALUE`) from `opens` to `closes`."""

    section: str
    before: str
    opens: str
    closes: str
    end: str
    values: ValueSyntax
    part: str = ""
    python: bool = False

    @property
    def begins(self) -> str:
        """Beginning of the text within the outer tags."""
        text = self.section + self.before
        return text[len(opening_of(self)) :]

    def head(self, name: str) -> str:
        """Return the text before a call's first argument, without the section."""
        return self.before + name + self.opens

    named_head = head


MAX_HEAD = 2000
"""Most letters before a call's arguments."""

CallFormat = JsonCalls | TagCalls | ValueCalls

HERMES = JsonCalls("", '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "", part="\n")
_GLM = TagCalls(
    "<tool_call>",
    "",
    "<arg_key>",
    "</arg_key><arg_value>",
    "</arg_value>",
    "</tool_call>",
    never=("</tool_call>",),
)
CODER = TagCalls(
    "<tool_call>\n<function=",
    ">\n",
    "<parameter=",
    ">\n",
    "</parameter>",
    "</function>\n</tool_call>",
    pad="\n",
    never=("</tool_call>",),
)

CALL_FORMATS: dict[str, CallFormat] = {
    "": HERMES,
    "json_tools": HERMES,
    "mistral": JsonCalls("[TOOL_CALLS][", '{"name": ', ', "arguments": ', "}", "]", part=", "),
    "mistral[ARGS]": JsonCalls("", "[TOOL_CALLS]", "[ARGS]", "", "", quoted=False),
    "kimi_k2": JsonCalls(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        quoted=False,
        never=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "qwen3_coder": CODER,
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": TagCalls(
        "<longcat_tool_call>",
        "",
        "<longcat_arg_key>",
        "</longcat_arg_key><longcat_arg_value>",
        "</longcat_arg_value>",
        "</longcat_tool_call>",
        never=("</longcat_tool_call>",),
    ),
    "minimax_m2": TagCalls(
        '<minimax:tool_call>\n<invoke name="',
        '">\n',
        '<parameter name="',
        '">',
        "</parameter>",
        "</invoke>\n</minimax:tool_call>",
        never=("</minimax:tool_call>",),
        tail="\n",
    ),
    "muse_spark": TagCalls(
        '<atem:invoke name="',
        '">\n',
        '<atem:parameter name="',
        '">',
        "</atem:parameter>",
        "</atem:invoke>\n",
        never=("</atem:function_calls>",),
        tail="\n",
        part="",
        section="<atem:function_calls>\n",
        end="</atem:function_calls>",
    ),
    "minicpm5": TagCalls(
        '<function name="',
        '">',
        '<param name="',
        '">',
        "</param>",
        "</function>",
        never=("</function>",),
        plain=r"([^<&\n]*)",
        cdata=("<![CDATA[", "]]>"),
    ),
    "kimi_k3": TagCalls(
        '<|open|>call tool="',
        '" index="1"<|sep|>',
        '<|open|>argument key="',
        '" type="%s"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        never=("<|open|>", "<|close|>call", "<|close|>tools"),
        part="",
        section="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        typed=True,
    ),
    "pythonic": ValueCalls(
        "<|tool_call_start|>[",
        "",
        "(",
        ")",
        "]<|tool_call_end|>",
        ValueSyntax(words=PYTHON_WORDS, never=("<|tool_call_end|>",)),
        part=", ",
        python=True,
    ),
    "gemma4": ValueCalls(
        "",
        "<|tool_call>call:",
        "{",
        "}<tool_call|>",
        "",
        ValueSyntax('<|"|>', spaces=False, never=("<tool_call|>", "\x00")),
    ),
    "function_gemma": ValueCalls(
        "",
        "<start_function_call>call:",
        "{",
        "}<end_function_call>",
        "",
        ValueSyntax("<escape>", spaces=False, never=("<end_function_call>",)),
    ),
}


def opening_of(row: CallFormat) -> str:
    """Return the text that identifies a call's beginning."""
    text = row.section + row.before
    ends = [at + 1 for end in (">", "]") if (at := text.find(end)) >= 0]
    return text[: min(ends)] if ends else text


READINGS = tuple(
    dict.fromkeys(row.reading for row in CALL_FORMATS.values() if isinstance(row, TagCalls) and not row.typed)
)
"""Readings of the formats with an identifying beginning."""
VALUE_CALLS = tuple(row for row in CALL_FORMATS.values() if isinstance(row, ValueCalls))


def format_name(tokenizer: Any) -> str:
    """Return the name of a model's spelling, as in mlx_lm.tool_parsers; "": unknown, ours is taught."""
    parser = tokenizer.tool_parser
    name = parser.__module__.rpartition(".")[2] if parser is not None else ""
    return "mistral[ARGS]" if name == "mistral" and "[ARGS]" in str(tokenizer.chat_template) else name


def unreadable(call_format: CallFormat, name: str, tool: bool) -> bool:
    """Return whether the format can't hold `name`, of a tool or else of a parameter."""
    if isinstance(call_format, ValueCalls) and call_format.python:
        return re.fullmatch(r"[\w./-](?:[\w.:/-]*[\w./-])?" if tool else r"[^\W\d]\w*", name) is None
    if isinstance(call_format, TagCalls):
        return re.search(r"[<>\"&\n]|^\s|\s$|^$", name) is not None
    return False


def begun_call(tag: str, text: str, names: Iterable[str]) -> tuple[str, str] | None:
    """Return (tool, arguments so far) of the call that begins with `tag` and `text`, in any format.

    The tool is "" where its name is cut off; arguments are "" unless they are JSON. None: no call of these.
    """
    written = tag + text
    tag, text = ("".join(part[:MAX_HEAD].split()) for part in (tag, written))
    begins = text == tag
    for row in CALL_FORMATS.values():
        for name in names:
            head = "".join((row.section + row.named_head(name)).split())
            head = head[max(head.find(tag), 0) :]
            if text.startswith(head):
                if not isinstance(row, JsonCalls):
                    return name, ""
                arguments = written[_end_of(head, written) :].partition("{")
                return name, "".join(arguments[1:]).partition(row.after or "\0")[0]
            begins = begins or head.startswith(text)
    return ("", "") if begins else None


def _end_of(head: str, text: str) -> int:
    """Return the end of `head`, which has no space, in `text`."""
    letters = (at for at, letter in enumerate(text, 1) if not letter.isspace())
    return next(itertools.islice(letters, len(head) - 1, None), len(text))


def attribute(text: str) -> str:
    """Escape text as the value of a tag's attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def carries_text(call_format: str) -> bool:
    """Return whether the calls of `spelling` have bare text: between tags, or between a mark of their own."""
    calls = CALL_FORMATS.get(call_format)
    return isinstance(calls, TagCalls) or (isinstance(calls, ValueCalls) and bool(calls.values.quote))
