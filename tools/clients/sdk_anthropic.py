"""A program: the official anthropic client against one server, streaming and not.

    python sdk_anthropic.py URL MODEL

Exits 0 when both ways gave the same blocks; prints what differs otherwise.
"""

import sys
from typing import Any

import anthropic


def main(url: str, model: str) -> int:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Tell me of kettles. " * 40}]
    options: Any = {"model": model, "max_tokens": 48, "extra_body": {"temperature": 0}, "messages": messages}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_message()
    one, two = ([block.model_dump() for block in message.content] for message in (whole, streamed))
    if one != two or whole.stop_reason != streamed.stop_reason:
        print(f"not streamed: {one} {whole.stop_reason}\nstreamed: {two} {streamed.stop_reason}")
        return 1
    counted = client.messages.count_tokens(model=model, messages=messages).input_tokens
    prompt = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    if counted != prompt:
        print(f"count_tokens says {counted}, usage says {prompt}")
        return 1
    names = [model.id for model in client.models.list()]
    if model not in names:
        print(f"{model} is not among the models: {names}")
        return 1
    print(" ".join(str(block.get("thinking") or block.get("text")) for block in one)[:200])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
