"""A program: the official openai client against one server whose model plays scenarios.

    python sdk_openai.py URL MODEL FOLDER

Over chat completions, then over responses: a tool loop that reads files of FOLDER, a second turn, an
answer that is abandoned in the middle, and a turn after it. Each request is sent streaming and not, and
both must give the same. Exits 0 when all went well; prints what didn't otherwise.
"""

import json
import sys
from pathlib import Path
from typing import Any

import openai

PARAMETERS: Any = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION: Any = {"name": "read_file", "description": "Read a text file.", "parameters": PARAMETERS}
PLAYED = (("two-files", "beta of saucers"), ("once-more", "Gamma tells of spoons"))


def read(arguments: str) -> str:
    return Path(json.loads(arguments)["path"]).read_text()


class Chat:
    """The messages of one conversation over /v1/chat/completions."""

    def __init__(self, client: openai.OpenAI, model: str, folder: str):
        self.client, self.folder = client, folder
        self.messages: list[Any] = [{"role": "system", "content": "You read files."}]
        self.options: Any = {
            "model": model,
            "messages": self.messages,
            "tools": [{"type": "function", "function": FUNCTION}],
        }

    def play(self, scenario: str) -> str:
        """One turn with its whole tool loop; the text of its last answer."""
        self.messages.append({"role": "user", "content": f"Scenario {scenario} in {self.folder}."})
        while True:
            message = self.both_ways()
            self.messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                result = read(call["function"]["arguments"])
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def both_ways(self) -> Any:
        whole = self.client.chat.completions.create(**self.options).choices[0]
        streamed: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: dict[int, dict[str, Any]] = {}
        usage = None
        for chunk in self.client.chat.completions.create(
            **self.options, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                streamed["content"] += choice.delta.content or ""
                streamed["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or []:
                    function = calls.setdefault(call.index, {"name": "", "arguments": ""})
                    function["id"] = call.id or function.get("id")
                    function["name"] += call.function.name or ""
                    function["arguments"] += call.function.arguments or ""
        check(usage is not None, "the stream had no usage")
        if calls:
            streamed["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {n: c[n] for n in ("name", "arguments")}}
                for c in calls.values()
            ]
        one = whole.message.to_dict()
        check(_plain(one) == _plain(streamed), f"whole: {one}\nstreamed: {streamed}")
        return streamed

    def abandon(self, scenario: str) -> None:
        """Close a stream in the middle of its text."""
        self.messages.append({"role": "user", "content": f"Scenario {scenario} in {self.folder}."})
        text = ""
        with self.client.chat.completions.create(**self.options, stream=True) as stream:
            for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if len(text) > 400:
                    break
        self.messages.append({"role": "assistant", "content": text})


def _plain(message: Any) -> Any:
    """A message without what differs by chance (ids of calls) or by form (null against absent)."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message.get("content") or "", message.get("reasoning_content") or "", calls


class Responses:
    """One conversation over /v1/responses, by previous_response_id."""

    def __init__(self, client: openai.OpenAI, model: str, folder: str):
        self.client, self.folder = client, folder
        self.options: Any = {
            "model": model,
            "instructions": "You read files.",
            "tools": [{"type": "function", **FUNCTION}],
        }
        self.last = None

    def play(self, scenario: str) -> str:
        given: Any = f"Scenario {scenario} in {self.folder}."
        while True:
            response = self.both_ways(given)
            self.last = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            given = [
                {"type": "function_call_output", "call_id": c.call_id, "output": read(c.arguments)}
                for c in calls
            ]

    def both_ways(self, given: Any) -> Any:
        asked = {**self.options, "input": given, "previous_response_id": self.last}
        whole = self.client.responses.create(**asked)
        events = list(self.client.responses.create(**asked, stream=True))
        check(events[-1].type == "response.completed", f"the last event was {events[-1].type}")
        streamed = events[-1].response
        one, two = (
            [item.to_dict() | {"id": "", "call_id": ""} for item in r.output] for r in (whole, streamed)
        )
        check(one == two, f"whole: {one}\nstreamed: {two}")
        return streamed

    def abandon(self, scenario: str) -> None:
        """Close a stream in the middle of its text; the conversation goes on before it."""
        text = ""
        asked = {**self.options, "input": f"Scenario {scenario} in {self.folder}."}
        with self.client.responses.create(**asked, previous_response_id=self.last, stream=True) as stream:
            for event in stream:
                text += event.delta if event.type == "response.output_text.delta" else ""
                if len(text) > 400:
                    break


def completions(client: openai.OpenAI, model: str) -> None:
    """A raw prompt has no script: the model's own words, greedy."""
    asked: Any = {"model": model, "max_tokens": 32, "temperature": 0, "prompt": "Saucers and cups. " * 40}
    whole = client.completions.create(**asked).choices[0].text
    streamed = client.completions.create(**asked, stream=True)
    pieces = "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
    check(pieces == whole, f"whole: {whole!r}\nstreamed: {pieces!r}")


def check(true: bool, why: str) -> None:
    if not true:
        sys.exit(why)


def main(url: str, model: str, folder: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    names = [model.id for model in client.models.list()]
    check(model in names, f"{model} is not among the models: {names}")
    text = ""
    for conversation in (Chat(client, model, folder), Responses(client, model, folder)):
        for scenario, said in PLAYED:
            text = conversation.play(scenario)
            check(said in text, f"{scenario}: {text!r}")
        conversation.abandon("long")
        text = conversation.play("both-at-once")
        check("Both are read" in text, text)
    completions(client, model)
    print(f"the last: {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
