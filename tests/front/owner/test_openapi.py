"""The OpenAPI document: every route is in it, and real answers are as it says."""

import json
import re

import jsonschema_rs
import pytest
from app_client import body, client
from fake_engine import EVERYTHING, FakeEngine, app_of

from omlxd.front.owner import openapi

DOCUMENT = json.loads(openapi.document(app_of(FakeEngine()).routes))


def validator(path: str, method: str, status: str):
    schema = DOCUMENT["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]
    return jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})


def test_every_route_is_told_and_no_other():
    routes = {
        (method.lower(), re.sub(":[a-z]+}", "}", route.path))
        for route in app_of(FakeEngine()).routes
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_every_reference_leads_somewhere():
    text = json.dumps(DOCUMENT)
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= set(DOCUMENT["components"]["schemas"])


def test_what_waits_in_line_has_a_priority():
    for path, method in (("/v1/decisions", "post"), ("/v1beta/models/{model}:generateContent", "post")):
        told = DOCUMENT["paths"][path][method]
        assert told["parameters"][-1]["name"] == "x-omlxd-priority"
        schema = told["requestBody"]["content"]["application/json"]["schema"]
        refused = jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})
        assert any(error.instance_path == ["priority"] for error in refused.iter_errors({"priority": "high"}))
    assert "priority" not in json.dumps(DOCUMENT["paths"]["/v1/embeddings"])


async def test_it_is_served():
    async with client(app_of(FakeEngine())) as http:
        answer = await http.get("/openapi.json")
    assert answer.json() == DOCUMENT and answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_answers_and_errors_are_as_it_says(path):
    given = {"input": "hi", "model": "tiny"} if path == "/v1/responses" else body(path)
    async with client(app_of(FakeEngine(EVERYTHING))) as http:
        answer = await http.post(path, json=given)
        assert answer.status_code == 200
        validator(path, "post", "200").validate(answer.json())
        for wrong, status in (({**given, "stream": 5}, "400"), ({**given, "model": "none"}, "404")):
            answer = await http.post(path, json=wrong)
            assert answer.status_code == int(status)
            validator(path, "post", status).validate(answer.json())


async def test_models_are_as_it_says():
    async with client(app_of(FakeEngine())) as http:
        validator("/v1/models", "get", "200").validate((await http.get("/v1/models")).json())
        one = await http.get("/v1/models/org/tiny")
    validator("/v1/models/{id}", "get", "200").validate(one.json())


async def test_what_the_owner_asks_is_as_it_says():
    engine = FakeEngine()
    async with client(app_of(engine)) as http:
        for path in ("/ready", "/omlxd/status"):
            validator(path, "get", "200").validate((await http.get(path)).json())
        engine.state = "loading"
        answer = await http.get("/ready")
        assert answer.status_code == 503
        validator("/ready", "get", "503").validate(answer.json())


def test_a_schemathesis_run_can_read_it():
    import schemathesis

    schema = schemathesis.openapi.from_dict(DOCUMENT)
    assert len(list(schema.get_all_operations())) == sum(map(len, DOCUMENT["paths"].values()))
    assert all(operation.ok() for operation in schema.get_all_operations())
