"""A program: the official openai client against one server: chat, completions and
responses, streaming and not.

    python sdk_openai.py URL MODEL

Exits 0 when both ways gave the same text; prints what differs otherwise.
"""

import sys

import openai


def main(url: str, model: str) -> int:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    asked = "Tell me of saucers. " * 40
    usage = {"stream": True, "stream_options": {"include_usage": True}}

    chat = {
        "model": model,
        "max_tokens": 48,
        "temperature": 0,
        "messages": [{"role": "user", "content": asked}],
    }
    message = client.chat.completions.create(**chat).choices[0].message
    thought = getattr(message, "reasoning_content", None) or ""
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**chat, **usage) if c.choices]
    streamed = (
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
        "".join(delta.content or "" for delta in deltas),
    )
    if streamed != (thought, message.content or ""):
        print(f"not streamed: {(thought, message.content)}\nstreamed: {streamed}")
        return 1

    text = {"model": model, "max_tokens": 32, "temperature": 0, "prompt": asked}
    completed = client.completions.create(**text).choices[0].text
    pieces = "".join(c.choices[0].text for c in client.completions.create(**text, **usage) if c.choices)
    if pieces != completed:
        print(f"not streamed: {completed!r}\nstreamed: {pieces!r}")
        return 1
    asked_for = {"model": model, "max_output_tokens": 32, "temperature": 0, "input": asked}
    first = client.responses.create(**asked_for)
    events = list(client.responses.create(**asked_for, stream=True))
    if [item.to_dict() | {"id": ""} for item in events[-1].response.output] != [
        item.to_dict() | {"id": ""} for item in first.output
    ]:
        print(f"not streamed: {first.output}\nstreamed: {events[-1].response.output}")
        return 1
    after = client.responses.create(**asked_for | {"input": "Go on."}, previous_response_id=first.id)
    if after.usage.input_tokens <= first.usage.input_tokens:
        print(f"previous_response_id: {first.usage} before, {after.usage} after")
        return 1
    names = [model.id for model in client.models.list()]
    if model not in names:
        print(f"{model} is not among the models: {names}")
        return 1
    print((thought + (message.content or ""))[:200])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
