"""Blocks of what ran at Anthropic, in a session that was begun there.

There is nothing to call or to answer here. What the model made of them stands in its text; the blocks
themselves are left out of the prompt.
"""

from __future__ import annotations

from typing import Union, get_args

import msgspec


class _Block(msgspec.Struct, tag_field="type"):
    """Fields are not read."""


class ServerToolUse(_Block, tag="server_tool_use"):
    pass


class WebSearchResult(_Block, tag="web_search_tool_result"):
    pass


class WebFetchResult(_Block, tag="web_fetch_tool_result"):
    pass


class CodeResult(_Block, tag="code_execution_tool_result"):
    pass


class BashCodeResult(_Block, tag="bash_code_execution_tool_result"):
    pass


class EditorResult(_Block, tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchResult(_Block, tag="tool_search_tool_result"):
    pass


class AdvisorResult(_Block, tag="advisor_tool_result"):
    pass


class McpToolUse(_Block, tag="mcp_tool_use"):
    pass


class McpToolResult(_Block, tag="mcp_tool_result"):
    pass


class McpToolListing(_Block, tag="mcp_tool_listing"):
    pass


class Fallback(_Block, tag="fallback"):
    """Where another model went on. Anthropic doesn't show it to the model either."""


FromServer = Union[
    ServerToolUse,
    WebSearchResult,
    WebFetchResult,
    CodeResult,
    BashCodeResult,
    EditorResult,
    ToolSearchResult,
    AdvisorResult,
    McpToolUse,
    McpToolResult,
    McpToolListing,
    Fallback,
]

FROM_SERVER: tuple[type, ...] = get_args(FromServer)
