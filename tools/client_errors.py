"""Say which of its own exceptions each client library makes of this server's errors.

    python tools/client_errors.py URL KEY

The Python that runs it has litellm, langchain-openai and langchain-anthropic (their SDKs come along); the
server at URL has KEY among its keys. Exit status 0: every exception is the one that the library's users
catch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import langchain_anthropic
import langchain_openai
import litellm
import openai
from langchain_core.exceptions import ContextOverflowError

LONG = "all of it " * 400_000
SAID: Any = [{"role": "user", "content": "Hi"}]
SAID_LONG: Any = [{"role": "user", "content": LONG}]
Check = tuple[str, Callable[[], object], type[BaseException]]


def checks(url: str, key: str, model: str) -> Iterator[Check]:
    """(what is asked, the asking, the exception)"""
    base = f"{url}/v1"
    gpt = openai.OpenAI(base_url=base, api_key=key, max_retries=0)
    claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)

    def lite(
        provider: str, messages: Any, key: str = key, model: str = model, stream: bool = False
    ) -> object:
        at = base if provider == "openai" else url
        answer = litellm.completion(
            f"{provider}/{model}",
            messages,
            api_base=at,
            api_key=key,
            max_tokens=1,
            max_retries=0,
            stream=stream,
        )
        return list(answer) if stream else answer

    for provider in ("openai", "anthropic"):
        for stream in (False, True):
            name = f"litellm, {provider}, stream={stream}"

            def ask(messages: Any, provider: str = provider, stream: bool = stream, **more: str) -> Callable:
                return lambda: lite(provider, messages, stream=stream, **more)

            yield f"{name}: too long", ask(SAID_LONG), litellm.ContextWindowExceededError
            yield f"{name}: wrong key", ask(SAID, key="wrong"), litellm.AuthenticationError
            yield f"{name}: no such model", ask(SAID, model="other/model"), litellm.NotFoundError

    chat = {"model": model, "base_url": base, "api_key": key, "max_retries": 0}
    for responses in (False, True):
        said = langchain_openai.ChatOpenAI(**chat, use_responses_api=responses)
        name = f"langchain-openai, responses={responses}"
        yield f"{name}: too long", lambda said=said: said.invoke(LONG), ContextOverflowError
        yield f"{name}: too long, stream", lambda said=said: list(said.stream(LONG)), ContextOverflowError
        wrong = langchain_openai.ChatOpenAI(**{**chat, "api_key": "wrong"}, use_responses_api=responses)
        yield f"{name}: wrong key", lambda wrong=wrong: wrong.invoke("Hi"), openai.AuthenticationError
    messages = {"model": model, "base_url": url, "api_key": key, "max_retries": 0, "max_tokens": 1}
    said = langchain_anthropic.ChatAnthropic(**messages)
    yield "langchain-anthropic: too long", lambda: said.invoke(LONG), ContextOverflowError
    wrong = langchain_anthropic.ChatAnthropic(**{**messages, "api_key": "wrong"})
    yield "langchain-anthropic: wrong key", lambda: wrong.invoke("Hi"), anthropic.AuthenticationError

    yield (
        "openai: too long",
        lambda: gpt.chat.completions.create(model=model, messages=SAID_LONG),
        openai.BadRequestError,
    )
    yield (
        "openai: no such model",
        lambda: gpt.chat.completions.create(model="other/model", messages=SAID),
        openai.NotFoundError,
    )
    yield (
        "anthropic: too long",
        lambda: claude.messages.create(model=model, messages=SAID_LONG, max_tokens=1),
        anthropic.BadRequestError,
    )


def main() -> int:
    url, key = sys.argv[1].rstrip("/"), sys.argv[2]
    litellm.suppress_debug_info = True
    listed = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).json()
    wrong = 0
    for name, ask, expected in checks(url, key, listed["data"][0]["id"]):
        try:
            ask()
            raised: BaseException | None = None
        except Exception as error:
            raised = error
        right = isinstance(raised, expected)
        wrong += not right
        print(f"{'ok   ' if right else 'WRONG'} {name}: {type(raised).__name__}", flush=True)
        if not right:
            print(f"      {expected.__name__} was expected; {str(raised)[:300]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
