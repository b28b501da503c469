"""The blocks of Anthropic's messages; api/anthropic/request.py translates them.

Other fields (`cache_control`, `citations`, `caller`) never reach the prompt, nor do blocks of tools that ran
at Anthropic: the model's text holds what it made of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import msgspec


class _Block(msgspec.Struct, tag_field="type"):
    """A block without fields that are read."""


# `fallback`: where another model went on. Anthropic doesn't show it to the model either.
_SERVER_KINDS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "fallback"),
)
FROM_SERVER: tuple[type, ...] = tuple(
    msgspec.defstruct(kind.title().replace("_", ""), [], bases=(_Block,), tag=kind) for kind in _SERVER_KINDS
)
if TYPE_CHECKING:
    FromServer = _Block
else:
    FromServer = Union[FROM_SERVER]


class Block(msgspec.Struct, tag_field="type"): ...


class Text(Block, tag="text"):
    text: str


class InputText(Text, tag="input_text"):
    """A text of OpenAI's."""


class OutputText(Text, tag="output_text"):
    """A text of OpenAI's in an answer."""


AnyText = Union[Text, InputText, OutputText]


class Thinking(Block, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinking(Block, tag="redacted_thinking"): ...


class ToolUse(Block, tag="tool_use"):
    id: str
    name: str
    input: Union[dict[str, Any], str]


class ToolReference(Block, tag="tool_reference"):
    tool_name: str


# --------------------------------------------------------------------------- images, documents


class Base64Source(Block, tag="base64"):
    data: str
    media_type: str


class UrlSource(Block, tag="url"):
    url: str | None = None


class FileSource(Block, tag="file"): ...


class Image(Block, tag="image"):
    source: Union[Base64Source, UrlSource, FileSource]


class Url(msgspec.Struct):
    url: str
    detail: str | None = None


class ImageUrl(Block, tag="image_url"):
    """The address of an image, as OpenAI's."""

    image_url: Union[str, Url]
    detail: str | None = None


class InputImage(ImageUrl, tag="input_image"):
    """An image, as OpenAI's."""


class FileData(msgspec.Struct):
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class File(Block, tag="file"):
    """A file, as OpenAI's."""

    file: FileData


class InputFile(Block, tag="input_file"):
    """A file of Responses."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    file_url: Any = None


AnyImage = Union[Image, ImageUrl, InputImage]
AnyFile = Union[File, InputFile]


class TextSource(Block, tag="text"):
    data: str


class ContentSource(Block, tag="content"):
    content: Union[str, list[Union[Text, Image]]]


class Document(Block, tag="document"):
    source: Union[TextSource, ContentSource, Base64Source, UrlSource, FileSource]
    title: str | None = None
    context: str | None = None


class SearchResult(Block, tag="search_result"):
    source: str
    title: str
    content: Union[str, list[AnyText]]


class ContainerUpload(Block, tag="container_upload"): ...


class BrowserState(Block, tag="browser_state"):
    """The tabs of the client's browser, with any fields."""

    tabs: list[dict[str, Any]]
    state_changes: list[dict[str, Any]] | None = None


class ToolResult(Block, tag="tool_result"):
    tool_use_id: str
    content: Union[
        str,
        list[Union[AnyText, AnyImage, AnyFile, Document, SearchResult, ToolReference, BrowserState]],
        None,
    ] = None
    is_error: bool | None = None


# --------------------------------------------------------------------------- tools that come and go


class ToolParam(msgspec.Struct):
    """A tool of the request. Without `input_schema` it is one of Anthropic's own."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
    function: ToolParam | None = None
    """The tool within `function`, as in chat completions; OpenAI has the schema as `parameters`."""
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None


class ByName(Block, tag="tool_reference"):
    name: str


class ByDefinition(Block, tag="tool_definition"):
    definition: ToolParam


class McpTool(Block, tag="mcp_tool_reference"): ...


class McpToolset(Block, tag="mcp_toolset_reference"): ...


class ToolAddition(Block, tag="tool_addition"):
    tool: Union[ByName, ByDefinition, McpTool, McpToolset]


class ToolRemoval(Block, tag="tool_removal"):
    tool: Union[ByName, ByDefinition, McpTool, McpToolset]


ToolChange = Union[ToolAddition, ToolRemoval]


class Compaction(Block, tag="compaction"):
    """A summary of everything before it. `content` None: no summary."""

    content: str | None = None
    tool_changes: list[ToolChange] | None = None


AnyBlock = Union[
    Union[
        AnyText, Thinking, RedactedThinking, ToolUse, ToolResult, AnyImage, AnyFile, Document, SearchResult
    ],
    Union[ContainerUpload, Compaction, ToolAddition, ToolRemoval, FromServer],
]
