"""The tools of a /v1/responses request: their form for the model, and the form of its calls.

| given            | the model sees                             | its call comes back as                |
|------------------|--------------------------------------------|---------------------------------------|
| `function`       | a function                                 | `function_call`                       |
| `custom`         | a function with one text, `input`          | `custom_tool_call`                    |
| `namespace`      | its tools, each named `<namespace>__<tool>` | the above, with `namespace` and `name` |
| any other (web_search, mcp, …) | nothing: those run on OpenAI's side | –                            |

One that names an address to ask (`server_url`) is refused, and so is `file_search`: what it would find is
what the answer is about.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...chat import Struct, Tool
from ...errors import bad_field
from ..fields.body import checked_name, convert, free_json, image_url, not_contacted
from ..openai.tool_choice import NamedTool, custom_tool


class ToolName(Struct, frozen=True):
    """A tool's name in calls that the client gets."""

    name: str
    namespace: str = ""
    custom: bool = False


class _RawTool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class ResponseTools:
    """The tools listed in the prompt, and their names. The same tools in order give the same prompt."""

    def __init__(self) -> None:
        self.echo: list[dict[str, Any]] = []
        """The tools as the client sent them."""
        self._listed: dict[str, Tool] = {}
        self.names: dict[str, ToolName] = {}
        """Model's name of a tool → its call's form for the client."""
        self._flat: dict[tuple[str, str], str] = {}

    @property
    def listed(self) -> tuple[Tool, ...]:
        return tuple(self._listed.values())

    def add(self, tool: Any, param: str, searched: bool = False) -> None:
        """Add a tool. `searched`: a search's result describes it. Raises InvalidRequest."""
        fields = free_json(tool, param)
        self.echo.append(fields)
        self._add(_flat(fields), "", param, searched)

    def flat_name(self, namespace: str, name: str) -> str:
        """Return the model's name of a tool, also of one that this request doesn't offer."""
        return self._flat.get((namespace, name)) or _joined(namespace, name)

    def called_by(self, choice: NamedTool) -> list[str] | None:
        """Return the model's names of the tools that a choice means; None: no such tool."""
        if choice.type == "namespace":
            return [flat for flat, tool in self.names.items() if tool.namespace == choice.called] or None
        flat = self.flat_name(choice.namespace or "", choice.called)
        return [flat] if flat in self.names else None

    def _add(self, fields: dict[str, Any], namespace: str, param: str, searched: bool) -> None:
        if isinstance(kind := fields.get("type"), str) and kind not in ("function", "custom", "namespace"):
            if kind == "file_search":
                raise bad_field(
                    f"{param}.type", "no files are kept or searched here; send their text in the input"
                )
            _refuse_addresses(fields, param)
            return
        try:
            tool = convert(fields, _RawTool)
        except msgspec.ValidationError as error:
            raise bad_field(param, f"{str(error).replace('`', '')}") from None
        if not tool.name:
            raise bad_field(f"{param}.name", "this field is required")
        checked_name(tool.name, f"{param}.name")
        if tool.type == "namespace":
            for index, inner in enumerate(tool.tools or []):
                self._add(inner, tool.name, f"{param}.tools.{index}", searched)
            return
        called = ToolName(tool.name, namespace, tool.type == "custom")
        flat = self._name_for(namespace, tool.name)
        self.names[flat] = called
        if searched or tool.defer_loading:  # listing it later would change the prompt's head
            return
        description = tool.description or ""
        if called.custom:
            self._listed[flat] = custom_tool(flat, description, tool.format, f"{param}.format")
        else:
            self._listed[flat] = Tool(
                flat, description, tool.parameters or tool.input_schema or {}, strict=bool(tool.strict)
            )

    def _name_for(self, namespace: str, name: str) -> str:
        """Return a tool's name: the same one for the same tool, of which the later counts, else a new one."""
        if entry := self._flat.get((namespace, name)):
            return entry
        flat = base = _joined(namespace, name)
        number = 2
        while flat in self.names:
            flat = f"{base}_{number}"
            number += 1
        self._flat[namespace, name] = flat
        return flat


def tool_name(names: dict[str, ToolName], called: str) -> ToolName:
    """Return the form of a call of `called`. Without a namespace the only such tool is meant."""
    if (entry := names.get(called)) is not None:
        return entry
    alike = [tool for tool in names.values() if tool.name == called]
    return alike[0] if len(alike) == 1 else ToolName(called)


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Flatten a tool: chat completions nest its fields, Anthropic gives no type."""
    kind = fields.get("type")
    nested = fields.get(kind) if kind in ("function", "custom") else None
    if isinstance(nested, dict):
        return {"type": kind, **nested}
    return {**fields, "type": "function"} if "input_schema" in fields else fields


def _refuse_addresses(fields: dict[str, Any], param: str) -> None:
    """Refuse addresses of a tool that is not ours to run: nothing here fetches them."""
    if fields.get("server_url"):
        raise not_contacted(f"{param}.server_url")
    mask = fields.get("input_image_mask")
    if isinstance(mask, dict) and isinstance(address := mask.get("image_url"), str):
        image_url(address, f"{param}.input_image_mask.image_url")


def _joined(namespace: str, name: str) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
