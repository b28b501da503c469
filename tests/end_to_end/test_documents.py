"""PDFs sent to a daemon: a session that reads one goes on, cached, also after the daemon was killed."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from daemon import BLOCK, Daemon, own_usage, prose
from media_files import locked_pdf, pdf

pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")

PAGES = pdf([prose(60).replace(". ", ".\n"), prose(60, 1).replace(". ", ".\n")])


def document(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(data).decode()}
    return {"type": "document", "title": "kettles.pdf", "source": source}


def session(data: bytes) -> list[dict[str, Any]]:
    """A tool gives a PDF back, and what it was follows as Claude Code sends it."""
    call = {"type": "tool_use", "id": "c1", "name": "Read", "input": {"file_path": "kettles.pdf"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "PDF read."}]}
    return [
        {"role": "user", "content": "Read kettles.pdf."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, document(data)]},
    ]


def cached(answer: dict[str, Any]) -> int:
    usage = own_usage(answer)
    return usage["cached_hot"] + usage["cached_cold"]


@pytest.mark.slow
def test_a_session_that_reads_a_pdf_goes_on(tmp_path):
    turns = session(PAGES)
    with Daemon(tmp_path) as daemon:
        first = daemon.messages(*turns)
        tokens = first["usage"]["input_tokens"] + first["usage"].get("cache_read_input_tokens", 0)
        assert tokens > 200
        turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Go on."}]
        second = daemon.messages(*turns)
        assert cached(second) >= tokens // BLOCK * BLOCK
        other = session(pdf(["A saucer."]))
        shared = cached(daemon.messages(*other))
        assert shared < cached(second)
        daemon.settled()
        daemon.kill()
    with Daemon(tmp_path) as daemon:
        again = daemon.messages(*turns)
        assert cached(again) >= cached(second) and again["content"] == second["content"]


@pytest.mark.slow
def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path):
    with Daemon(tmp_path) as daemon:
        for data, why in (
            (locked_pdf(), "is locked with a password"),
            (b"%PDF-1.7 x", "is damaged, or it is no PDF"),
        ):
            ask = {"model": daemon.model, "max_tokens": 4, "messages": session(data)}
            answer = daemon.post("/v1/messages", ask)
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "messages.2.content.1.document.source: the PDF 'kettles.pdf' " + why in message
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        ask = {"model": daemon.model, "messages": [{"role": "user", "content": [image]}]}
        answer = daemon.post("/v1/chat/completions", ask)
        assert answer.status_code == 400, json.dumps(answer.json())
        assert daemon.messages("hello")["content"]
