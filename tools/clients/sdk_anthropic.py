"""A program: the official anthropic client against one server whose model plays scenarios.

    python sdk_anthropic.py URL MODEL FOLDER

A tool loop that reads files of FOLDER, a second turn, an answer that is abandoned in the middle, and a
turn after it. Each request is sent streaming and not, and both must give the same blocks. Exits 0 when
all went well; prints what didn't otherwise.
"""

import sys
from pathlib import Path
from typing import Any

import anthropic

TOOLS: Any = [
    {
        "name": "read_file",
        "description": "Read a text file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]


class Player:
    def __init__(self, url: str, model: str, folder: str):
        self.client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        self.folder = folder
        self.messages: list[Any] = []
        self.options: Any = {
            "model": model,
            "max_tokens": 16000,
            "tools": TOOLS,
            "system": "You read files.",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "messages": self.messages,
        }

    def play(self, scenario: str) -> str:
        """One turn with its whole tool loop; the text of its last answer."""
        self.messages.append({"role": "user", "content": f"Scenario {scenario} in {self.folder}."})
        while True:
            message = self.both_ways()
            blocks = [block.model_dump(exclude_none=True) for block in message.content]
            self.messages.append({"role": "assistant", "content": blocks})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in message.content if block.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": Path(str(call.input["path"])).read_text(),
                }
                for call in calls
            ]
            self.messages.append({"role": "user", "content": results})

    def both_ways(self) -> Any:
        counted = self.client.messages.count_tokens(
            **{key: value for key, value in self.options.items() if key != "max_tokens"}
        )
        whole = self.client.messages.create(**self.options)
        with self.client.messages.stream(**self.options) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_message()
        one, two = (
            [block.model_dump() | {"id": ""} for block in message.content] for message in (whole, streamed)
        )
        check(one == two and whole.stop_reason == streamed.stop_reason, f"whole: {one}\nstreamed: {two}")
        usage = whole.usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        check(counted.input_tokens == prompt, f"count_tokens says {counted.input_tokens}, usage {prompt}")
        return streamed

    def abandon(self, scenario: str) -> None:
        """Close a stream in the middle of its text."""
        self.messages.append({"role": "user", "content": f"Scenario {scenario} in {self.folder}."})
        text = ""
        with self.client.messages.stream(**self.options) as stream:
            for piece in stream.text_stream:
                text += piece
                if len(text) > 400:
                    break
        self.messages.append({"role": "assistant", "content": text})


def check(true: bool, why: str) -> None:
    if not true:
        sys.exit(why)


def main(url: str, model: str, folder: str) -> None:
    player = Player(url, model, folder)
    names = [model.id for model in player.client.models.list()]
    check(model in names, f"{model} is not among the models: {names}")
    for scenario, said in (("two-files", "beta of saucers"), ("once-more", "Gamma tells of spoons")):
        text = player.play(scenario)
        check(said in text, f"{scenario}: {text!r}")
    player.abandon("long")
    text = player.play("both-at-once")
    check("Both are read" in text, text)
    print(f"{len(player.messages)} messages, the last: {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
