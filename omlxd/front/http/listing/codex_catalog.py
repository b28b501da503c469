"""Writes the models as the Codex catalog of `model_catalog_url`.

Without it Codex warns of an unknown model, leaves `apply_patch` out and sends a prompt for models that it
knows nothing of: 12,800 tokens before the first question, where 7,000 do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...engines.model import Card
from ...engines.names.names import basename

INSTRUCTIONS = """\
You are a coding agent. You run in Codex, in the user's terminal, and work in the user's project until the \
task is done.

- Look before you change: read the files that matter, search with `rg` (or `grep`), and follow the \
instructions of AGENTS.md files.
- Change files with `apply_patch`. Keep to the project's style, and change no more than the task needs.
- Check your work: run the tests or the command that shows it.
- Leave changes that are not yours as they are. Ask before you delete or overwrite what can't be restored.
- Say in a sentence what you are about to do before a long step. End with a short answer: what you did, how \
you checked it, and what is left.
"""


class ReasoningLevel(msgspec.Struct):
    effort: str
    description: str


class TruncationPolicy(msgspec.Struct, frozen=True):
    """Limit of a tool's output. `limit`: in `mode`."""

    mode: str = "tokens"
    limit: int = 10_000


class CodexModel(msgspec.Struct):
    """Codex 0.171 takes no entry in which a field without a default here, or `shell_type` and those after
    it, is missing. `context_window`: tokens; null while nobody knows."""

    slug: str
    display_name: str
    description: str
    priority: int
    context_window: int | None
    input_modalities: list[str]
    supported_reasoning_levels: list[ReasoningLevel]
    default_reasoning_level: str | None
    supports_reasoning_summaries: bool
    shell_type: str = "shell_command"
    visibility: str = "list"
    supported_in_api: bool = True
    support_verbosity: bool = False
    base_instructions: str = INSTRUCTIONS
    truncation_policy: TruncationPolicy = TruncationPolicy()
    experimental_supported_tools: tuple[str, ...] = ()
    supports_parallel_tool_calls: bool = True
    apply_patch_tool_type: str = "freeform"


class CodexCatalog(msgspec.Struct):
    models: list[CodexModel]


_LEVELS = {
    "low": "Short thoughts",
    "medium": "As much thought as most tasks need",
    "high": "Long thoughts, for hard tasks",
}


def codex_catalog(cards: Sequence[Card]) -> CodexCatalog:
    """Return the models that chat, in the order of the list."""
    return CodexCatalog(
        [_model(card, rank) for rank, card in enumerate(card for card in cards if card.kind == "chat")]
    )


def _model(card: Card, rank: int) -> CodexModel:
    levels = [ReasoningLevel(*level) for level in _LEVELS.items()] if card.thinking else []
    return CodexModel(
        slug=card.id,
        display_name=basename(card.id),
        description=f"{card.family or 'A model'} on this machine, served by omlxd",
        priority=rank,
        context_window=card.context_length,
        input_modalities=["text", "image"] if card.images else ["text"],
        supported_reasoning_levels=levels,
        default_reasoning_level="medium" if levels else None,
        supports_reasoning_summaries=bool(levels),
    )
