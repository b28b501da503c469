"""What the configuration file says of a model, put into the requests that go to it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..chat import Conversation, GenerateRequest, RawPrompt
from ..config.models import NEXT_LOAD, ModelSettings
from .engines import basename

NOTHING = ModelSettings()

Prompt = Conversation | RawPrompt


def settings_of(model_id: str, tables: Mapping[str, ModelSettings]) -> ModelSettings:
    """The settings of `model_id`: those under its whole id, else those under its last part."""
    return tables.get(model_id) or tables.get(basename(model_id)) or NOTHING


def with_settings(request: GenerateRequest, settings: ModelSettings) -> GenerateRequest:
    """`request` with what it leaves open taken from `settings`."""
    if settings is NOTHING:
        return request
    own = request.sampling
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    given = {name: value for name in fields if (value := getattr(settings, name)) is not None}
    sampling = {name: value for name, value in given.items() if getattr(own, name) is None}
    return msgspec.structs.replace(
        request,
        prompt=prompt_with_settings(request.prompt, settings),
        sampling=msgspec.structs.replace(own, **sampling),
        context_limit=settings.context_limit or request.context_limit,
    )


def prompt_with_settings(
    prompt: Conversation | RawPrompt, settings: ModelSettings
) -> Conversation | RawPrompt:
    """`prompt` with the template's arguments from `settings`; the request's own go first."""
    if not isinstance(prompt, Conversation):
        return prompt
    return msgspec.structs.replace(
        prompt,
        template_args={**settings.template_args, **prompt.template_args},
        thinking=settings.thinking if prompt.thinking is None else prompt.thinking,
    )


def for_next_load(old: ModelSettings, new: ModelSettings) -> list[str]:
    """Names, as the file spells them, of changed settings that a loaded engine does not take up."""
    return [name.replace("_", "-") for name in NEXT_LOAD if getattr(old, name) != getattr(new, name)]
