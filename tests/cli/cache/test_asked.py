"""How verbs of `omlxd cache` name a request: one way for all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from omlxd.cli.cache import pin, why_miss
from omlxd.cli.cache.asked import NAMED, named_request
from omlxd.cli.daemon.owner_api import WhyMissBody
from omlxd.errors import ConfigError


def test_a_request_is_a_session_an_id_or_a_file(tmp_path: Path):
    assert named_request("last") == WhyMissBody(request_id="last")
    assert named_request("req_1f") == WhyMissBody(request_id="req_1f")
    assert named_request("my/session") == WhyMissBody(session="my/session")
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("a prompt")
    assert named_request(str(text)).body == {"prompt": "a prompt"}
    assert named_request(str(text), "m").body == {"prompt": "a prompt", "model": "m"}
    lines.write_text("\n".join(json.dumps({"input": each}) for each in "xy"))
    last = named_request(str(lines))
    assert (last.path, last.body) == ("/v1/responses", {"input": "y"})
    assert named_request(str(lines), path="/v1/chat/completions").path == "/v1/chat/completions"
    with pytest.raises(ConfigError, match="No such file"):
        named_request(str(tmp_path / "none.json"))


@pytest.mark.parametrize("verb", [pin, why_miss])
def test_verbs_describe_it_alike(verb):
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=900))
    verb.add_arguments(parser)
    assert NAMED in parser.format_help()
