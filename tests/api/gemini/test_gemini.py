"""Google's Gemini API over a scripted engine: bodies in, chunks out, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from app_client import client
from fake_engine import EVERYTHING, HELLO, INFO, USAGE, FakeEngine, app_of

from omlxd.api.gemini.request import parse, parse_count
from omlxd.api.gemini.schema import json_schema
from omlxd.chat import (
    AnswerFormat,
    Conversation,
    DocumentPart,
    Failed,
    Finished,
    ImagePart,
    Message,
    TextDelta,
    TextPart,
    ThinkingPart,
    TokenLogprob,
    Tool,
    ToolCallCut,
    ToolCallDelta,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.errors import InvalidRequest

GENERATE, STREAM = "/v1beta/models/tiny:generateContent", "/v1beta/models/tiny:streamGenerateContent"
HI = {"role": "user", "parts": [{"text": "hi"}]}
PNG = {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(b"\x89PNG").decode()}}
PDF = {"inlineData": {"mimeType": "application/pdf", "data": base64.b64encode(b"%PDF-1").decode()}}
LOOK = {"functionDeclarations": [{"name": "look"}, {"name": "read"}]}


def parsed(*contents: Any, **fields: Any):
    return parse(False)(json.dumps({"contents": contents or [HI], **fields}).encode(), {})


def talk(*contents: Any, **fields: Any) -> Conversation:
    prompt = parsed(*contents, **fields).generate.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def config(**fields: Any):
    return parsed(generationConfig=fields)


def refused(param: str, *contents: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        parsed(*contents, **fields)
    assert error.value.param == param
    return error.value.message


# --------------------------------------------------------------------------- contents


def call(name: str, id: str | None = None, **args: Any) -> dict:
    return {"functionCall": {"name": name, "args": args, **({"id": id} if id else {})}}


def result(name: str, response: Any, id: str | None = None, **more: Any) -> dict:
    return {"functionResponse": {"name": name, "response": response, **({"id": id} if id else {}), **more}}


def test_contents_hold_texts_thoughts_media_and_calls_with_their_results():
    turn = [
        {"text": "hm", "thought": True},
        {"text": "Well"},
        {**call("look", at=1), "thoughtSignature": "s"},
    ]
    answered = [result("look", {"output": "seen"}, parts=[PNG]), {"text": "go on"}]
    prompt = talk(
        {"parts": [{"text": "see"}, PNG, PDF]}, {"role": "model", "parts": turn}, {"parts": answered}
    )
    see, said, seen, on = prompt.messages
    assert [type(part) for part in see.parts] == [TextPart, ImagePart, DocumentPart]
    assert said.parts == (ThinkingPart("hm"), TextPart("Well"), ToolCallPart("call_1", "look", {"at": 1}))
    only = seen.parts[0]
    assert isinstance(only, ToolResultPart) and (only.call_id, only.text) == ("call_1", "seen")
    assert seen.role == "tool" and len(only.images) == 1
    assert on == Message("user", (TextPart("go on"),))


def test_an_answer_that_is_kept_by_chunks_is_one_message():
    """Google's SDKs keep each chunk of a streamed answer as a content of its own."""
    chunks = [{"role": "model", "parts": [{"text": text}]} for text in ("Hel", "lo", " there ", "!")]
    thought = {"role": "model", "parts": [{"text": "a", "thought": True}, {"text": " b", "thought": True}]}
    _, said = talk(HI, thought, *chunks).messages
    assert said == Message("assistant", (ThinkingPart("a b"), TextPart("Hello there !")))


def test_results_find_their_calls_by_id_or_by_name_in_order():
    calls = {"role": "model", "parts": [call("look"), call("read", "r"), call("look")]}
    results = {
        "role": "function",
        "parts": [result("read", {}, "r"), *[result("look", {"n": n}) for n in (1, 2)]],
    }
    tools = talk(HI, calls, results).messages[2].parts
    ids = [(part.call_id, part.text) for part in tools if isinstance(part, ToolResultPart)]
    assert ids == [("r", ""), ("call_1", '{"n":1}'), ("call_3", '{"n":2}')]
    param = "contents.2.parts.0.functionResponse.name"
    assert "'look'" in refused(
        param, HI, {"role": "model", "parts": [call("read")]}, {"parts": [result("look", {})]}
    )


def test_a_result_that_is_sent_twice_stands_once():
    """As Gemini CLI does with all results when it resumes a session."""
    calls = {"role": "model", "parts": [call("look", "a"), call("look", "b")]}
    seen = [result("look", {"output": name}, name) for name in "aabb"]
    tools = talk(HI, calls, {"parts": seen}).messages[2].parts
    assert [part.call_id for part in tools if isinstance(part, ToolResultPart)] == ["a", "b"]
    other = [*seen, result("look", {"output": "c"}, "a")]
    assert "'look'" in refused("contents.2.parts.4.functionResponse.name", HI, calls, {"parts": other})


def test_the_tokens_of_a_result_alone_are_counted():
    """Gemini CLI asks for those of a file that a tool has read."""
    body = {"contents": [{"parts": [result("read", {"output": "a kettle"}, "r"), PNG]}]}
    prompt = parse_count(json.dumps(body).encode(), {}).generate.prompt
    assert isinstance(prompt, Conversation)
    (asked,) = prompt.messages
    assert asked.role == "user" and asked.parts[0] == TextPart("a kettle") and len(asked.parts) == 2


@pytest.mark.parametrize(
    ("response", "text", "is_error"),
    [
        ({"output": "a"}, "a", False),
        ({"result": "a"}, "a", False),
        ({"error": "a"}, "a", True),
        ({"error": {"code": 5}}, '{"error":{"code":5}}', True),
        ({"output": [1]}, '{"output":[1]}', False),
        ({"b": 1, "a": "x"}, '{"a":"x","b":1}', False),
    ],
)
def test_a_result_is_text(response, text, is_error):
    part = (
        talk(HI, {"role": "model", "parts": [call("t")]}, {"parts": [result("t", response)]})
        .messages[2]
        .parts[0]
    )
    assert isinstance(part, ToolResultPart) and (part.text, part.is_error) == (text, is_error)


def test_names_in_snake_case_are_the_same():
    """As Google's own examples for curl write them; names of the client's own stay."""
    schema = {"type": "OBJECT", "properties": {"max_items": {"type": "STRING"}}}
    snake = {
        "contents": [
            {"parts": [{"inline_data": {"mime_type": "image/png", "data": "AAAA"}}]},
            {
                "role": "model",
                "parts": [{"function_call": {"name": "f", "args": {"inline_data": {"mime_type": 1}}}}],
            },
            {"parts": [{"function_response": {"name": "f", "response": {"top_k": 1}}}]},
        ],
        "system_instruction": {"parts": {"text": "s"}},
        "generation_config": {"top_k": 3.0, "max_output_tokens": 5, "stop_sequences": ["x"]},
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["f"]}},
        "tools": {"function_declarations": [{"name": "f", "parameters": schema}]},
    }
    request = parse(False)(json.dumps(snake).encode(), {})
    prompt = request.generate.prompt
    assert isinstance(prompt, Conversation)
    system, _, said, answered = prompt.messages
    assert system == Message("system", (TextPart("s"),))
    assert said.parts == (ToolCallPart("call_1", "f", {"inline_data": {"mime_type": 1}}),)
    assert '"top_k"' in answered.parts[0].text
    assert request.generate.sampling.top_k == 3 and request.generate.sampling.max_tokens == 5
    assert prompt.tools[0].parameters["properties"] == {"max_items": {"type": "string"}}
    assert (prompt.tool_choice, prompt.allowed_tools) == ("required", ("f",))


@pytest.mark.parametrize(
    ("param", "part"),
    [
        ("contents.0.parts.0.fileData", {"fileData": {"fileUri": "https://a.example/b"}}),
        ("contents.0.parts.0.inlineData.mimeType", {"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}}),
        ("contents.0.parts.0.inlineData.data", {"inlineData": {"mimeType": "image/png"}}),
        ("contents.0.parts.0.inlineData.data", {"inlineData": {"mimeType": "image/png", "data": "&"}}),
        ("contents.0.parts.0.functionCall", call("look")),
    ],
)
def test_parts_that_are_refused(param, part):
    refused(param, {"parts": [part]})


def test_what_ran_at_google_is_left_out():
    parts = [{"executableCode": {"code": "1"}}, {"codeExecutionResult": {"output": "1"}}, {"text": "One."}]
    assert talk(HI, {"role": "model", "parts": parts}).messages[1].parts == (TextPart("One."),)
    prompt = talk(tools=[{"googleSearch": {}}, {"codeExecution": {}, "urlContext": {}}, LOOK])
    assert [tool.name for tool in prompt.tools] == ["look", "read"]
    assert "searched" in refused("tools.0.fileSearch", tools=[{"fileSearch": {}}])
    refused("tools.0.mcpServers", tools=[{"mcpServers": [{"name": "a"}]}])


# --------------------------------------------------------------------------- tools and fields


def test_schemas_of_openapi():
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "example": "x"},
            "tags": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int32"}, "maxItems": "3"},
            "kind": {"type": "STRING", "enum": ["a", "B"], "nullable": True, "description": "d"},
            "any": {"anyOf": [{"type": "NUMBER"}, {"type": "TYPE_UNSPECIFIED"}]},
        },
        "propertyOrdering": ["type"],
        "required": ["type"],
    }
    assert json_schema(schema) == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"type": "integer", "format": "int32"}, "maxItems": 3},
            "kind": {"description": "d", "anyOf": [{"type": "string", "enum": ["a", "B"]}, {"type": "null"}]},
            "any": {"anyOf": [{"type": "number"}, {}]},
        },
        "required": ["type"],
    }
    declared = {
        "name": "f",
        "parametersJsonSchema": {"type": "object", "properties": {"a": {"type": "string"}}},
    }
    assert talk(tools=[{"functionDeclarations": [declared]}]).tools == (
        Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}}),
    )


@pytest.mark.parametrize(
    ("given", "choice", "allowed"),
    [
        ({}, "auto", ()),
        ({"mode": "AUTO"}, "auto", ()),
        ({"mode": "VALIDATED"}, "auto", ()),
        ({"mode": "NONE", "allowedFunctionNames": ["look"]}, "none", ()),
        ({"mode": "ANY"}, "required", ()),
        ({"mode": "any", "allowedFunctionNames": ["look", "look"]}, "required", ("look",)),
    ],
)
def test_which_functions_may_be_called(given, choice, allowed):
    prompt = talk(tools=[LOOK], toolConfig={"functionCallingConfig": given})
    assert (prompt.tool_choice, prompt.allowed_tools) == (choice, allowed)


def test_functions_that_are_not_there():
    where = "toolConfig.functionCallingConfig"
    refused(
        f"{where}.allowedFunctionNames",
        tools=[LOOK],
        toolConfig={"functionCallingConfig": {"allowedFunctionNames": ["x"]}},
    )
    refused(f"{where}.mode", toolConfig={"functionCallingConfig": {"mode": "ANY"}})
    refused(f"{where}.mode", tools=[LOOK], toolConfig={"functionCallingConfig": {"mode": "MAYBE"}})


@pytest.mark.parametrize(
    ("given", "thinking", "effort"),
    [
        ({"includeThoughts": True}, None, ""),
        ({"thinkingBudget": 0}, False, ""),
        ({"thinkingBudget": -1}, True, ""),
        ({"thinkingBudget": 8192.0}, True, ""),
        ({"thinkingLevel": "LOW"}, True, "low"),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, None, ""),
    ],
)
def test_thinking(given, thinking, effort):
    request = config(thinkingConfig=given)
    prompt = request.generate.prompt
    assert isinstance(prompt, Conversation) and (prompt.thinking, prompt.effort) == (thinking, effort)
    assert request.thoughts is bool(given.get("includeThoughts"))


def test_answer_formats():
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    typed = {"type": "object", "properties": {"a": {"type": "string"}}}
    json_type = {"responseMimeType": "application/json"}
    param = "generationConfig.responseSchema"
    assert config(**json_type, responseSchema=schema).generate.format == AnswerFormat(
        "json", typed, param=param
    )
    for name in ("responseJsonSchema", "_responseJsonSchema"):
        made = config(**json_type, **{name: typed}).generate.format
        assert made and made.schema == typed
    assert config(responseSchema=schema).generate.format == AnswerFormat("json", typed, param=param)
    enum = config(responseMimeType="text/x.enum", responseSchema={"type": "STRING", "enum": ["a", "b"]})
    assert enum.generate.format == AnswerFormat("choice", choices=("a", "b"), param=param)
    assert config(responseMimeType="text/plain").generate.format is None
    free = config(**json_type).generate.format
    assert free and free.kind == "json"
    refused("generationConfig.responseMimeType", generationConfig={"responseMimeType": "text/xml"})
    both = {**json_type, "responseSchema": schema, "responseJsonSchema": typed}
    refused("generationConfig.responseJsonSchema", generationConfig=both)


def test_sampling_and_fields_that_are_refused():
    sampling = config(
        temperature=0,
        topP=1,
        topK=64,
        seed=7,
        maxOutputTokens=9,
        stopSequences=["x"],
        responseLogprobs=True,
        logprobs=3,
        presencePenalty=1,
        frequencyPenalty=-1,
        candidateCount=2,
    )
    got = sampling.generate.sampling
    assert (got.temperature, got.top_p, got.top_k, got.seed, got.max_tokens) == (0, 1, 64, 7, 9)
    assert (got.stop, got.logprobs, got.presence_penalty, got.frequency_penalty) == (("x",), 3, 1, -1)
    assert sampling.n == 2
    refused("cachedContent", cachedContent="cachedContents/1")
    refused("generationConfig.responseModalities", generationConfig={"responseModalities": ["TEXT", "AUDIO"]})
    refused("generationConfig.temperature", generationConfig={"temperature": 3})
    refused("contents", {"parts": []})
    assert parsed(safetySettings=[{"category": "a"}], labels={"a": "b"}).generate == parsed().generate


def test_a_whole_request_is_counted_too():
    whole = {"model": "models/x", "contents": [HI], "systemInstruction": {"parts": [{"text": "s"}]}}
    for body in (whole, {"generateContentRequest": whole}):
        prompt = parse_count(json.dumps(body).encode(), {}).generate.prompt
        assert isinstance(prompt, Conversation) and [m.role for m in prompt.messages] == ["system", "user"]


# --------------------------------------------------------------------------- answers


async def post(path: str, script: Any = HELLO, engine: Any = None, **fields: Any):
    async with client(app_of(engine or FakeEngine(script))) as http:
        return await http.post(path, json={"contents": [HI], **fields})


def chunks_of(text: str) -> list[dict]:
    return [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]


THOUGHTS = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}


async def test_an_answer_and_its_stream_in_both_shapes_say_the_same():
    calls = [call("read", "call_1", path="/tmp/a", n=1), call("read", "call_2")]
    for fields, thought in ((THOUGHTS, [{"text": "Let me think.", "thought": True}]), ({}, [])):
        whole = (await post(GENERATE, EVERYTHING, **fields)).json()
        candidate = whole["candidates"][0]
        assert candidate["content"] == {
            "role": "model",
            "parts": [*thought, {"text": "I will look."}, *calls],
        }
        assert candidate["finishReason"] == "STOP" and whole["modelVersion"] == "tiny"
        usage = whole["usageMetadata"]
        assert (usage["promptTokenCount"], usage["cachedContentTokenCount"]) == (100, 64)
        assert (usage["candidatesTokenCount"], usage["thoughtsTokenCount"]) == (4, 3)
        assert usage["totalTokenCount"] == 107
        sse = await post(f"{STREAM}?alt=sse", EVERYTHING, **fields)
        assert sse.headers["content-type"].startswith("text/event-stream")
        array = await post(STREAM, EVERYTHING, **fields)
        assert array.headers["content-type"] == "application/json"
        for chunks in (chunks_of(sse.text), array.json()):
            assert chunks[-1]["usageMetadata"] == usage
            assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"
            parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
            texts = "".join(part["text"] for part in parts if "text" in part and "thought" not in part)
            assert texts == "I will look." and [part for part in parts if "functionCall" in part] == calls
            assert any("thought" in part for part in parts) is bool(thought)


@pytest.mark.parametrize(("reason", "said"), [("length", "MAX_TOKENS"), ("stop", "MALFORMED_FUNCTION_CALL")])
async def test_a_call_that_is_cut_is_never_sent(reason, said):
    cut = ToolCallCut("c", "read", '{"path": "/tm', "{}")
    script = (TextDelta("Well"), ToolCallDelta("c", "read", '{"path": "/tm'), cut, Finished(reason, USAGE))
    candidate = (await post(GENERATE, script)).json()["candidates"][0]
    assert candidate["finishReason"] == said and candidate["content"]["parts"] == [{"text": "Well"}]
    streamed = await post(f"{STREAM}?alt=sse", script)
    assert "functionCall" not in streamed.text and said in streamed.text


async def test_several_candidates_and_their_log_probabilities():
    logprob = TokenLogprob("Hi", -0.5, top=(("Hi", -0.5), ("Ho", -1.0)))
    script = (TextDelta("Hi", (logprob,)), Finished("stop", USAGE))
    fields = {"generationConfig": {"candidateCount": 2, "responseLogprobs": True, "logprobs": 2}}
    first, second = (await post(GENERATE, script, **fields)).json()["candidates"]
    assert (first["index"], second["index"], first["avgLogprobs"]) == (0, 1, -0.5)
    result = first["logprobsResult"]
    assert result["chosenCandidates"] == [{"token": "Hi", "logProbability": -0.5}]
    assert [each["token"] for each in result["topCandidates"][0]["candidates"]] == ["Hi", "Ho"]
    chunks = chunks_of((await post(f"{STREAM}?alt=sse", script, **fields)).text)
    assert {each["index"] for chunk in chunks for each in chunk["candidates"]} == {0, 1}
    assert [bool(chunk.get("usageMetadata")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_silence_is_filled_in_each_shape():
    """With data, which Google's SDK for JavaScript reads alone, and with blanks in an array."""
    script = (0.3, *HELLO)
    async with client(app_of(FakeEngine(script), ping_interval_s=0.05, header_grace_s=0.01)) as http:
        sse = await http.post(f"{STREAM}?alt=sse", json={"contents": [HI]})
        array = await http.post(STREAM, json={"contents": [HI]})
    pings = [chunk for chunk in chunks_of(sse.text) if not chunk["candidates"]]
    assert len(pings) >= 2 and all("usageMetadata" not in ping for ping in pings)
    assert "".join(c["candidates"][0]["content"]["parts"][0]["text"] for c in array.json()) == "Hello there"


async def test_errors_in_googles_shape():
    async with client(app_of(FakeEngine(), api_key="k")) as http:
        for path in (GENERATE, GENERATE + "?key=wrong"):
            answer = await http.post(path, json={"contents": [HI]})
            assert answer.status_code == 401 and "API key not valid" in answer.json()["error"]["message"]
        assert (await http.post(GENERATE + "?key=k", json={"contents": [HI]})).status_code == 200
        goog = {"x-goog-api-key": "k"}
        assert (await http.post(GENERATE, json={"contents": [HI]}, headers=goog)).status_code == 200
        assert (await http.get("/v1beta/models", headers=goog)).status_code == 200
        assert (await http.get("/v1/models?key=k")).status_code == 401  # Keys stay out of other paths.
    error = (await post(GENERATE, contents=[{"role": "judge"}])).json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT") and "contents.0.role" in error[
        "message"
    ]
    long = Failed("prompt_too_long", "prompt is too long: 9000 tokens > 4095 maximum")
    error = (await post(GENERATE, (long,))).json()["error"]
    assert error["message"].startswith(
        "The input token count (9000) exceeds the maximum number of tokens allowed (4095)"
    )
    error = (await post("/v1beta/models/none:generateContent")).json()["error"]
    assert (error["code"], error["status"]) == (404, "NOT_FOUND")
    answer = await post(GENERATE, (Failed("overloaded", "full", retry_after=7),))
    assert answer.status_code == 503 and answer.json()["error"]["details"][0]["retryDelay"] == "7s"


async def test_an_error_within_a_stream_is_bare():
    """Not an event: Google's SDKs raise what is bare, and take an event with an error for an empty chunk."""
    late = (TextDelta("a"), 0.05, Failed("internal", "broken"))
    async with client(app_of(FakeEngine(late), header_grace_s=0.01)) as http:
        sse = (await http.post(f"{STREAM}?alt=sse", json={"contents": [HI]})).text.strip().split("\n\n")
        assert sse[0].startswith("data: ") and json.loads(sse[-1])["error"]["status"] == "INTERNAL"
        assert (await http.post(STREAM, json={"contents": [HI]})).json()[-1]["error"]["code"] == 500


async def test_models_and_names():
    async with client(app_of(FakeEngine(), FakeEngine(model_id="org/second"))) as http:
        first, second = (await http.get("/v1beta/models")).json()["models"]
        assert (first["name"], second["name"]) == ("models/org/tiny", "models/org/second")
        assert first["inputTokenLimit"] == INFO.context_length
        assert (await http.get("/v1beta/models/org/second")).json() == second
        google = {"x-goog-api-client": "google-genai-sdk/2"}
        assert (await http.get("/v1/models", headers=google)).json()["models"] == [first, second]
        assert (await http.get("/v1/models/org/second", headers=google)).json() == second
        for name in ("org/tiny", "tiny", "org%2Ftiny", "gemini-2.5-flash"):
            for version in ("v1", "v1beta"):
                answer = await http.post(f"/{version}/models/{name}:countTokens", json={"contents": [HI]})
                assert answer.json() == {"totalTokens": 42}, answer.text


async def test_an_errors_code_is_the_status_and_verbs_that_are_none_are_named():
    async with client(app_of(FakeEngine())) as http:
        for verb in ("embedContent", "frob", "batchEmbedContents"):
            answer = await http.post(f"/v1beta/models/omlxd-demo:{verb}", json={})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["status"]) == (404, 404, "NOT_FOUND")
            for word in (verb, "generateContent", "streamGenerateContent", "countTokens"):
                assert word in error["message"]
        for method, path in (("PUT", GENERATE), ("POST", "/v1beta/models"), ("GET", "/v1beta/nothing")):
            answer = await http.request(method, path)
            assert answer.status_code in (404, 405) and answer.json()["error"]["code"] == answer.status_code
