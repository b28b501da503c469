"""Tools for a model whose chat template has none: they reach it as text, calls are read, a line says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from daemon import demo_model_with
from gguf_files import TEMPLATE
from host import Host, chat

from omlxd.chat import Tool, ToolCall

READ = Tool("Read", "Reads a file.", {"type": "object", "properties": {}, "additionalProperties": False})


def test_one_line_warns_and_a_forced_call_is_a_call(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    host = Host(demo_model_with(TEMPLATE, tmp_path / "chatml"))

    def warnings() -> list[str]:
        return [line.getMessage() for line in caplog.records if "tools" in line.getMessage()]

    try:
        host.ask(chat(max_tokens=1))
        host.ask(chat(tools=(READ,), tool_choice="none", max_tokens=1))
        assert not warnings()
        for _ in range(2):
            events = host.ask(chat(tools=(READ,), tool_choice="required", max_tokens=64))
            assert any(isinstance(event, ToolCall) and event.name == "Read" for event in events)
        (line,) = warnings()
        assert line.startswith("tiny: its chat template has no tools: ")
    finally:
        host.close()
