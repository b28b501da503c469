"""What the configuration file says of a model, put into the requests that go to it."""

from __future__ import annotations

import msgspec

from ..chat import Conversation, GenerateRequest, RawPrompt
from ..config import NEXT_LOAD, SAMPLING, ModelSettings, Settings
from .engines import basename

NOTHING = ModelSettings()

Prompt = Conversation | RawPrompt


def settings_of(model_id: str, settings: Settings) -> ModelSettings:
    """The settings of `model_id`: those under its whole id, else under its last part, else the defaults."""
    tables = settings.models
    return tables.get(model_id) or tables.get(basename(model_id)) or settings.defaults


def with_settings(request: GenerateRequest, settings: ModelSettings) -> GenerateRequest:
    """`request` with what it leaves open taken from `settings`."""
    if settings == NOTHING:
        return request
    own = request.sampling
    given = {name: value for name in SAMPLING if (value := getattr(settings, name)) is not None}
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
