"""The openai and anthropic SDKs, each before the app on a fake engine; real sockets, loopback."""

from __future__ import annotations

import contextlib

import anthropic
import openai
from fake_engine import app_of, served


@contextlib.asynccontextmanager
async def claude(engine, **settings):
    async with (
        served(app_of(engine, **settings)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def gpt(engine, **settings):
    async with (
        served(app_of(engine, **settings)) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
    ):
        yield client
