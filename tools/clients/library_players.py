"""A program: one Python library against a server whose model plays scenarios (script.py).

    python library_players.py LIBRARY URL MODEL

Four parts: `chat` (one question), `stream` (the same in pieces), `tools` (a loop of two calls that the
library itself runs), `structured` (an answer as a typed object). A line of JSON each: {"part", "problem"},
where "" is no problem; a first line has the version. It imports nothing of this repository: it runs in a
Python of the library's own.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

SAID, SNOW = "Hello. I am the scripted model.", "Snow in both."
HELLO, WEATHER, PERSON = (f"Scenario {name} in /x." for name in ("hello", "weather", "person"))
ASKED: list[tuple[str, int]] = []
"""What the tool was called with, in order."""
Player = Callable[[str, str], dict[str, Callable[[], object]]]
"""(url, model) → part → what plays it and returns what it got."""


def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: where
        days: how many
    """
    ASKED.append((city, days))
    return f"snow in {city}"


def person_class() -> Any:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    return Person


def streamed(pieces: Any) -> str:
    """Texts of a stream joined. Raises ValueError if it came in one piece."""
    texts = [piece for piece in pieces if piece]
    if len(texts) < 3:
        raise ValueError(f"it came in {len(texts)} pieces")
    return "".join(texts)


def _ollama(url: str, model: str) -> dict[str, Callable[[], object]]:
    import ollama

    client, kind = ollama.Client(host=url, timeout=120), person_class()

    def ask(text: str, **more: Any) -> Any:
        return client.chat(model, [{"role": "user", "content": text}], **more)

    def tools() -> object:
        messages: list[Any] = [{"role": "user", "content": WEATHER}]
        while True:
            message = client.chat(model, messages, tools=[get_weather]).message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                result = get_weather(**call.function.arguments)
                messages.append({"role": "tool", "tool_name": call.function.name, "content": result})

    return {
        "chat": lambda: ask(HELLO).message.content,
        "stream": lambda: streamed(part.message.content for part in ask(HELLO, stream=True)),
        "tools": tools,
        "structured": lambda: kind.model_validate_json(
            ask(PERSON, format=kind.model_json_schema()).message.content
        ),
    }


def _langchain(chat: Any) -> dict[str, Callable[[], object]]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    def text_of(message: Any) -> str:
        content = message.content
        if isinstance(content, str):
            return content
        return "".join(block.get("text", "") for block in content if block["type"] == "text")

    def tools() -> object:
        function = tool(get_weather)
        bound, messages = chat.bind_tools([function]), [HumanMessage(WEATHER)]
        while True:
            message = bound.invoke(messages)
            messages.append(message)
            if not message.tool_calls:
                return text_of(message)
            for call in message.tool_calls:
                messages.append(ToolMessage(function.invoke(call["args"]), tool_call_id=call["id"]))

    return {
        "chat": lambda: text_of(chat.invoke(HELLO)),
        "stream": lambda: streamed(text_of(chunk) for chunk in chat.stream(HELLO)),
        "tools": tools,
        "structured": lambda: chat.with_structured_output(person_class()).invoke(PERSON),
    }


def _langchain_openai(url: str, model: str) -> dict[str, Callable[[], object]]:
    from langchain_openai import ChatOpenAI

    return _langchain(ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_retries=0))


def _langchain_anthropic(url: str, model: str) -> dict[str, Callable[[], object]]:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url, api_key="none", max_retries=0, max_tokens=4000)
    return _langchain(chat)


def _langchain_ollama(url: str, model: str) -> dict[str, Callable[[], object]]:
    from langchain_ollama import ChatOllama

    return _langchain(ChatOllama(model=model, base_url=url))


def _llamaindex(llm: Any) -> dict[str, Callable[[], object]]:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    function = FunctionTool.from_defaults(get_weather)

    def tools() -> object:
        messages = [ChatMessage(WEATHER)]
        while True:
            answer = llm.chat_with_tools([function], chat_history=messages)
            messages.append(answer.message)
            calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
            if not calls:
                return answer.message.content
            for call in calls:
                result = str(function(**call.tool_kwargs))
                named = {"tool_call_id": call.tool_id, "name": call.tool_name}
                messages.append(ChatMessage(result, role="tool", additional_kwargs=named))

    return {
        "chat": lambda: llm.chat([ChatMessage(HELLO)]).message.content,
        "stream": lambda: streamed(part.delta for part in llm.stream_chat([ChatMessage(HELLO)])),
        "tools": tools,
        "structured": lambda: (
            llm.as_structured_llm(person_class()).chat([ChatMessage(PERSON)]).raw  # a tool call
        ),
    }


def _llamaindex_openai(url: str, model: str) -> dict[str, Callable[[], object]]:
    from llama_index.llms.openai_like import OpenAILike

    named = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return _llamaindex(OpenAILike(model, api_base=f"{url}/v1", api_key="none", **named))


def _llamaindex_ollama(url: str, model: str) -> dict[str, Callable[[], object]]:
    from llama_index.llms.ollama import Ollama

    return _llamaindex(Ollama(model, base_url=url, request_timeout=120))


def _litellm(provider: str, path: str) -> Player:
    def play(url: str, model: str) -> dict[str, Callable[[], object]]:
        import litellm

        litellm.suppress_debug_info = True

        def ask(messages: Any, **more: Any) -> Any:
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            named = {"api_base": url + path, "api_key": "none", "max_tokens": 4000, "max_retries": 0}
            return litellm.completion(f"{provider}/{model}", messages, **named, **more)

        def tools() -> object:
            properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
            schema = {"type": "object", "properties": properties, "required": ["city", "days"]}
            function = {"name": "get_weather", "description": "The weather.", "parameters": schema}
            messages: list[Any] = [{"role": "user", "content": WEATHER}]
            while True:
                message = ask(messages, tools=[{"type": "function", "function": function}]).choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                for call in message.tool_calls:
                    result = get_weather(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

        def structured() -> object:
            kind = person_class()
            return kind.model_validate_json(ask(PERSON, response_format=kind).choices[0].message.content)

        return {
            "chat": lambda: ask(HELLO).choices[0].message.content,
            "stream": lambda: streamed(part.choices[0].delta.content for part in ask(HELLO, stream=True)),
            "tools": tools,
            "structured": structured,
        }

    return play


def _pydantic_ai(made: Callable[[], Any]) -> dict[str, Callable[[], object]]:
    """made: a model with connections of its own, which can't be used in another event loop."""
    from pydantic_ai import Agent

    async def stream() -> str:
        async with Agent(made()).run_stream(HELLO) as result:
            return streamed([piece async for piece in result.stream_text(delta=True, debounce_by=None)])

    return {
        "chat": lambda: Agent(made()).run_sync(HELLO).output,
        "stream": lambda: asyncio.run(stream()),
        "tools": lambda: Agent(made(), tools=[get_weather]).run_sync(WEATHER).output,
        "structured": lambda: Agent(made(), output_type=person_class()).run_sync(PERSON).output,
    }


def _pydantic_ai_openai(url: str, model: str) -> dict[str, Callable[[], object]]:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def made() -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        return OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))

    return _pydantic_ai(made)


def _pydantic_ai_anthropic(url: str, model: str) -> dict[str, Callable[[], object]]:
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    def made() -> Any:
        client = AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        return AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client))

    return _pydantic_ai(made)


def _openai_agents(responses: bool) -> Player:
    def play(url: str, model: str) -> dict[str, Callable[[], object]]:
        import agents
        from openai import AsyncOpenAI

        agents.set_tracing_disabled(True)
        kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel

        def agent(**more: Any) -> Any:
            client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            return agents.Agent("A", model=kind(model, client), **more)

        async def stream() -> str:
            pieces = []
            async for event in agents.Runner.run_streamed(agent(), HELLO).stream_events():
                data = getattr(event, "data", None)
                if getattr(data, "type", "") == "response.output_text.delta":
                    pieces.append(data.delta)
            return streamed(pieces)

        def run(agent: Any, text: str) -> Any:
            return agents.Runner.run_sync(agent, text).final_output

        return {
            "chat": lambda: run(agent(), HELLO),
            "stream": lambda: asyncio.run(stream()),
            "tools": lambda: run(agent(tools=[agents.function_tool(get_weather)]), WEATHER),
            "structured": lambda: run(agent(output_type=person_class()), PERSON),
        }

    return play


def _instructor(url: str, model: str) -> dict[str, Callable[[], object]]:
    import instructor
    from openai import OpenAI

    plain = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(mode: Any, **more: Any) -> Any:
        client = instructor.from_openai(plain, mode=mode)
        messages = [{"role": "user", "content": PERSON}]
        return client.create(model=model, response_model=person_class(), messages=messages, **more)

    def stream() -> object:
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        messages: Any = [{"role": "user", "content": PERSON}]
        parts = list(client.create_partial(model=model, response_model=person_class(), messages=messages))
        return SAID if len(parts) > 2 and check_person(parts[-1]) is None else f"parts: {parts}"

    return {
        "chat": lambda: ask(instructor.Mode.JSON),
        "stream": stream,
        "tools": lambda: ask(instructor.Mode.TOOLS),
        "structured": lambda: ask(instructor.Mode.JSON_SCHEMA),
    }


def _llm(url: str, model: str) -> dict[str, Callable[[], object]]:
    from llm.default_plugins.openai_models import Chat

    chat = Chat("scripted", model_name=model, api_base=f"{url}/v1", supports_schema=True, supports_tools=True)
    chat.key = "none"
    kind = person_class()
    return {
        "chat": lambda: chat.prompt(HELLO, stream=False).text(),
        "stream": lambda: streamed(chat.prompt(HELLO)),
        "tools": lambda: chat.chain(WEATHER, tools=[get_weather]).text(),
        "structured": lambda: kind.model_validate_json(chat.prompt(PERSON, schema=kind, stream=False).text()),
    }


def _anthropic(url: str, model: str) -> dict[str, Callable[[], object]]:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def said(text: str) -> Any:
        return {"model": model, "max_tokens": 4000, "messages": [{"role": "user", "content": text}]}

    def text_of(message: Any) -> str:
        return "".join(block.text for block in message.content if block.type == "text")

    def stream() -> str:
        with client.messages.stream(**said(HELLO)) as events:
            return streamed(events.text_stream)

    def tools() -> object:
        # Its runner keeps the conversation in a thread of the server's.
        runner = client.beta.messages.tool_runner(**said(WEATHER), tools=[anthropic.beta_tool(get_weather)])
        return text_of(runner.until_done())

    return {
        "chat": lambda: text_of(client.messages.create(**said(HELLO))),
        "stream": stream,
        "tools": tools,
        "structured": lambda: (
            client.messages.parse(**said(PERSON), output_format=person_class()).parsed_output
        ),
    }


PLAYERS: dict[str, tuple[str, Player]] = {
    "anthropic": ("anthropic", _anthropic),
    "ollama": ("ollama", _ollama),
    "langchain-openai": ("langchain-openai", _langchain_openai),
    "langchain-anthropic": ("langchain-anthropic", _langchain_anthropic),
    "langchain-ollama": ("langchain-ollama", _langchain_ollama),
    "llama-index-openai-like": ("llama-index-llms-openai-like", _llamaindex_openai),
    "llama-index-ollama": ("llama-index-llms-ollama", _llamaindex_ollama),
    "litellm-openai": ("litellm", _litellm("openai", "/v1")),
    "litellm-anthropic": ("litellm", _litellm("anthropic", "")),
    "litellm-ollama": ("litellm", _litellm("ollama_chat", "")),
    "pydantic-ai-openai": ("pydantic-ai-slim", _pydantic_ai_openai),
    "pydantic-ai-anthropic": ("pydantic-ai-slim", _pydantic_ai_anthropic),
    "openai-agents-responses": ("openai-agents", _openai_agents(responses=True)),
    "openai-agents-chat": ("openai-agents", _openai_agents(responses=False)),
    "instructor": ("instructor", _instructor),
    "llm": ("llm", _llm),
}
"""Name → (package on PyPI, player)."""


def check_person(got: Any) -> str | None:
    """None: it is the person of the script."""
    right = getattr(got, "name", None) == "Ada" and getattr(got, "age", None) == 36
    return None if right else f"it gave {got!r}"


def problem_of(part: str, play: Callable[[], object]) -> str:
    """What was wrong with a part; "": nothing."""
    ASKED.clear()
    try:
        got = play()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if hasattr(got, "age"):
        return check_person(got) or ""
    if part == "structured":
        return f"it gave {got!r}"
    wanted = SNOW if part == "tools" else SAID
    if str(got).strip() != wanted:
        return f"it said {str(got)[:200]!r}"
    if part == "tools" and ASKED != [("Oslo", 2), ("Røros", 1)]:
        return f"the tool was called with {ASKED}"
    return ""


def main(library: str, url: str, model: str) -> None:
    package, player = PLAYERS[library]
    print(json.dumps({"version": metadata.version(package)}), flush=True)
    for part, play in player(url, model).items():
        print(json.dumps({"part": part, "problem": problem_of(part, play)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
