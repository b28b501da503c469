"""What the scripted model says: a table of scenarios, each a list of steps.

A prompt names its scenario and its folder: `Scenario two-files in /tmp/project.` The model's n-th answer
after that prompt is the scenario's n-th step, or "Done." when there are no more. Tools are called by
whatever name and arguments the client's own tools have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omlxd.chat import Conversation, Message, TextPart, Tool

THOUGHT = "The next step of the scenario is plain."
"""What it thinks, wherever the prompt lets it think."""


@dataclass(slots=True, frozen=True)
class Say:
    text: str


@dataclass(slots=True, frozen=True)
class Read:
    """Read files of the scenario's folder, all in one turn."""

    files: Sequence[str]
    text: str = ""


@dataclass(slots=True, frozen=True)
class Delegate:
    """Give another scenario to a sub-agent."""

    scenario: str


@dataclass(slots=True, frozen=True)
class Call:
    """A call as it is, whatever the client has."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Fill:
    """An object: as arguments of the first tool, or as JSON if there are no tools."""

    fields: dict[str, Any]


Step = Say | Read | Delegate | Call | Fill

LONG = " ".join(f"Line {n} of a long answer." for n in range(1500))

SCENARIOS: dict[str, list[Step]] = {
    "hello": [Say("Hello. I am the scripted model.")],
    "two-files": [
        Read(["alpha.txt"], "I read the first file."),
        Read(["beta.txt"]),
        Say("Alpha tells of kettles, beta of saucers."),
    ],
    "both-at-once": [Read(["alpha.txt", "beta.txt"]), Say("Both are read.")],
    "once-more": [Read(["gamma.txt"]), Say("Gamma tells of spoons.")],
    "long": [Say(LONG)],
    "sub-agent": [
        Delegate("once-more"),
        Read(["alpha.txt"], "The sub-agent is done."),
        Say("The sub-agent read gamma, I read alpha."),
    ],
    "pdf": [Read(["pages.pdf"], "I read the pages."), Say("The pages tell of a kettle.")],
    "picture": [Read(["shot.png"], "I look at the shot."), Say("The shot is red and blue.")],
    "weather": [
        Call("get_weather", {"city": "Oslo", "days": 2}),
        Call("get_weather", {"city": "Røros", "days": 1}),
        Say("Snow in both."),
    ],
    "person": [Fill({"name": "Ada", "age": 36}), Say("That is Ada.")],
}

SUMMARY = (
    "<analysis>\nWe read some files.\n</analysis>\n\n<summary>\nThe user asked for scenarios, and all "
    "of them were played.\n</summary>"
)
_SCENARIO = re.compile(r"Scenario ([a-z-]+) in (\S+?)\.(?:\s|$|<|\")")
_ORDERS = (
    ("create a detailed summary", SUMMARY),
    # Codex asks for it in a message of its own, or the daemon does for it.
    ("context checkpoint compaction", SUMMARY),
    ("summarise this conversation", SUMMARY),
    ("title", '{"title": "A scenario"}'),
)
"""Words of a request that has no scenario of its own, and the answer to it."""


@dataclass(slots=True, frozen=True)
class Answer:
    """What the model says: text, and calls as (name, arguments)."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


def answer_to(conversation: Conversation) -> Answer:
    """The answer that the table gives."""
    at, name, folder = _last_scenario(conversation.messages)
    last = _text(conversation.messages[-1]).lower()
    orders = [said for words, said in _ORDERS if words in last]
    if orders and (at < 0 or not conversation.tools or orders[0] is SUMMARY):
        return Answer(orders[0])
    if at < 0:
        return Answer("I know no such scenario.")
    turn = sum(message.role == "assistant" for message in conversation.messages[at + 1 :])
    steps = SCENARIOS.get(name, [])
    return _played(steps[turn], folder, conversation.tools) if turn < len(steps) else Answer("Done.")


def _last_scenario(messages: Sequence[Message]) -> tuple[int, str, str]:
    """Index of the last user message that names a scenario, its name, its folder; index -1: none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "user" and (found := _SCENARIO.findall(_text(messages[index]))):
            return index, *found[-1]
    return -1, "", ""


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))


def _played(step: Step, folder: str, tools: Sequence[Tool]) -> Answer:
    match step:
        case Say(text):
            return Answer(text)
        case Read(files, text):
            return Answer(text, tuple(_read_call(f"{folder}/{name}", tools) for name in files))
        case Delegate(scenario):
            return Answer("", (_delegate_call(f"Scenario {scenario} in {folder}.", tools),))
        case Call(name, arguments):
            return Answer("", ((name, arguments),))
        case Fill(fields) if tools:
            # In the schema's order, which a grammar holds the model to.
            names = sorted(fields, key=list(tools[0].parameters["properties"]).index)
            return Answer("", ((tools[0].name, {name: fields[name] for name in names}),))
        case Fill(fields):
            return Answer(json.dumps(fields))


_READERS = {
    "Read": ("file_path",),
    "read": ("filePath", "path"),
    "read_file": ("path", "file_path"),
    "view": ("path",),
}
"""Tool → names that its argument may have."""


def _read_call(path: str, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]]:
    """A call that reads `path` with the tools that there are."""
    names = {tool.name: tool for tool in tools}
    for name, arguments in _READERS.items():
        if name in names:
            known = names[name].parameters.get("properties", {})
            return name, {next((one for one in arguments if one in known), arguments[0]): path}
    if path.endswith(".png") and "view_image" in names:
        return "view_image", {"path": path}
    for name, argument in (("exec_command", "cmd"), ("shell_command", "command"), ("shell", "command")):
        if name in names:
            schema = names[name].parameters.get("properties", {}).get(argument, {})
            command = ["cat", path] if schema.get("type") == "array" else f"cat {path}"
            return name, {argument: command}
    return "Read", {"file_path": path}


def _delegate_call(prompt: str, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]]:
    names = [tool.name for tool in tools]
    name = next((name for name in ("Task", "Agent", "task") if name in names), "Task")
    kind = "general" if name == "task" else "general-purpose"
    return name, {"description": "Play a scenario", "prompt": prompt, "subagent_type": kind}


def written(answer: Answer, prompt_end: str) -> str:
    """`answer` as a model of Qwen's kind writes it after a prompt that ends with `prompt_end`.

    It thinks unless the prompt holds a closed thinking block already.
    """
    calls = [_markup(name, arguments) for name, arguments in answer.calls]
    said = "\n".join([*([answer.text] if answer.text else []), *calls])
    end = prompt_end.rstrip()
    if end.endswith("</think>"):
        return said
    opened = "" if end.endswith("<think>") else "<think>\n"
    return f"{opened}{THOUGHT}\n</think>\n\n{said}"


def _markup(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
