"""A program: the official ollama client against one server whose model plays scenarios.

    python sdk_ollama.py URL MODEL FOLDER

The lists first, then over chat: a tool loop that reads files of FOLDER, an answer that is abandoned in the
middle, and a turn after it; then generate. Each request is sent streaming and not, and both must give the
same. Exits 0 when all went well; prints what didn't otherwise.
"""

import sys
from pathlib import Path
from typing import Any

import ollama


def read_file(path: str) -> str:
    """Read a text file.

    Args:
      path: of the file
    """
    return Path(path).read_text()


class Chat:
    def __init__(self, client: ollama.Client, model: str, folder: str):
        self.client, self.model, self.folder = client, model, folder
        self.messages: list[Any] = [{"role": "system", "content": "You read files."}]

    def play(self, scenario: str) -> str:
        """One turn with its whole tool loop; the text of its last answer."""
        self.messages.append({"role": "user", "content": f"Scenario {scenario} in {self.folder}."})
        while True:
            message = self.both_ways()
            self.messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = read_file(**call.function.arguments)
                name = call.function.name
                self.messages.append({"role": "tool", "tool_name": name, "content": result})

    def both_ways(self) -> Any:
        whole = self.client.chat(self.model, self.messages, tools=[read_file])
        streamed = ollama.Message(role="assistant", content="", thinking="")
        calls: list[Any] = []
        for part in self.client.chat(self.model, self.messages, tools=[read_file], stream=True):
            streamed.content = (streamed.content or "") + (part.message.content or "")
            streamed.thinking = (streamed.thinking or "") + (part.message.thinking or "")
            calls += part.message.tool_calls or []
        streamed.tool_calls = calls or None
        check(part.done and (part.prompt_eval_count or 0) > 0, "the stream had no end")
        check(_plain(whole.message) == _plain(streamed), f"whole: {whole.message}\nstreamed: {streamed}")
        return streamed

    def abandon(self, scenario: str) -> None:
        """Close a stream in the middle of its text."""
        self.messages.append({"role": "user", "content": f"Scenario {scenario} in {self.folder}."})
        text = ""
        stream = self.client.chat(self.model, self.messages, tools=[read_file], stream=True)
        for part in stream:
            text += part.message.content or ""
            if len(text) > 400:
                break
        stream.close()
        self.messages.append({"role": "assistant", "content": text})


def _plain(message: Any) -> Any:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.content or "", message.thinking or "", calls


def check(right: bool, why: str) -> None:
    if not right:
        raise SystemExit(why)


def main() -> None:
    url, model, folder = sys.argv[1:]
    client = ollama.Client(host=url, timeout=600)
    listed = [one.model for one in client.list().models]
    check(listed == [f"{model}:latest"], f"list: {listed}")
    shown = client.show(listed[0] or "")
    check({"completion", "tools"} <= set(shown.capabilities or []), f"show: {shown.capabilities}")
    check([one.model for one in client.ps().models] == listed, "ps: it is not loaded")
    chat = Chat(client, model, folder)
    for scenario, said in (("two-files", "beta of saucers"), ("once-more", "Gamma tells of spoons")):
        check(said in (text := chat.play(scenario)), f"{scenario}: {text}")
    chat.abandon("long")
    check("I am the scripted model" in chat.play("hello"), "the turn after the abandoned one")
    answer = client.generate(model, f"Scenario hello in {folder}.").response
    parts = client.generate(model, f"Scenario hello in {folder}.", stream=True)
    check("I am the scripted model" in answer, f"generate: {answer}")
    check(answer == "".join(part.response for part in parts), "generate differs as a stream")


if __name__ == "__main__":
    main()
