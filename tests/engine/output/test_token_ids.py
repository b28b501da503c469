"""Token ids in requests and answers: `stop_token_ids` and `return_token_ids`."""

from __future__ import annotations

import json

import pytest
from app_client import body, client
from fake_engine import USAGE, FakeEngine, app_of
from host import Host, finished, raw, text_of
from msgspec.structs import replace

from omlxd.chat import Finished, TextDelta, TokenIds
from omlxd.errors import InvalidRequest
from omlxd.models import demo


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory):
    host = Host(demo.build_demo(tmp_path_factory.mktemp("models") / "demo"))
    yield host
    host.close()


def test_an_answer_ends_at_a_stop_token_and_its_ids_are_those_of_its_text(host: Host):
    request = replace(raw("Once upon a time", temperature=0.0, max_tokens=12), return_token_ids=True)
    events = host.ask(request)
    first, *rest = [event for event in events if isinstance(event, TokenIds)]
    tokenizer = host.engine.loaded.tokenizer
    assert first.prompt == tuple(tokenizer.encode("Once upon a time")) and not any(e.prompt for e in rest)
    ids = [id for event in (first, *rest) for id in event.ids]
    assert len(ids) == finished(events).usage.completion_tokens == 12
    assert tokenizer.decode(ids) == text_of(events)

    stop = next(id for at, id in enumerate(ids) if id not in ids[:at] and at > 2)
    stopped = host.ask(
        replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,)), return_token_ids=False)
    )
    assert finished(stopped).reason == "stop"
    assert finished(stopped).usage.completion_tokens == ids.index(stop) + 1
    assert text_of(stopped) == tokenizer.decode(ids[: ids.index(stop)])
    assert not any(isinstance(event, TokenIds) for event in stopped)


def test_a_prompt_alone_has_its_ids(host: Host):
    (ids, *_) = host.ask(replace(raw("Once", max_tokens=0), return_token_ids=True))[1:]
    assert isinstance(ids, TokenIds) and ids.prompt and not ids.ids


def test_the_limit_of_a_protocol_holds_where_none_is_given(host: Host):
    for more, tokens in (({}, 5), ({"max_tokens": 2}, 2)):
        answer = host.ask(raw("Once", usual_max_tokens=5, **more))
        assert finished(answer).usage.completion_tokens == tokens


def test_a_stop_token_beyond_the_vocabulary_is_refused(host: Host):
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id 999999 is not in") as caught:
        host.ask(raw(stop_token_ids=(999999,)))
    assert caught.value.param == "stop_token_ids"
    with pytest.raises(InvalidRequest, match="logit_bias: token id 999999 is not in"):
        host.ask(raw(logit_bias={5: 1.0, 999999: 1.0}))


SCRIPT = (
    TokenIds((7,), (1, 2, 3)),
    TextDelta("Hello"),
    TokenIds((8,)),
    TextDelta(" there"),
    Finished("stop", USAGE),
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_ids_stand_where_vllm_has_them(path: str):
    engine = FakeEngine(SCRIPT)
    asked = body(path, return_token_ids=True, stop_token_ids=[5, 6])
    async with client(app_of(engine)) as http:
        whole = (await http.post(path, json=asked)).json()
        lines = (await http.post(path, json={**asked, "stream": True})).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all(request.return_token_ids for request in engine.requests)
    assert all(request.sampling.stop_token_ids == (5, 6) for request in engine.requests)
    for answers in ([whole], chunks):
        choices = [answer["choices"][0] for answer in answers]
        assert [id for choice in choices for id in choice.get("token_ids", ())] == [7, 8]
        holders = answers if path == "/v1/chat/completions" else choices
        assert [h["prompt_token_ids"] for h in holders if "prompt_token_ids" in h] == [[1, 2, 3]]
    # A chunk has the ids of its own text.
    texts = [(c.get("text") or c.get("delta", {}).get("content"), c.get("token_ids")) for c in choices]
    assert [pair for pair in texts if pair[0] or pair[1]] == [("Hello", [7]), (" there", [8])]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", list(range(129))),
        ("return_token_ids", "yes"),
        ("repetition_context_size", -1),
    ],
)
async def test_what_is_no_token_id_is_refused_by_name(field: str, value: object):
    async with client(app_of(FakeEngine())) as http:
        answer = await http.post("/v1/completions", json=body("/v1/completions", **{field: value}))
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(field)


async def test_a_response_has_no_place_for_ids():
    async with client(app_of(FakeEngine())) as http:
        answer = await http.post("/v1/responses", json={"input": "hi", "return_token_ids": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_token_ids"
