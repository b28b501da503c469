"""Hypothesis strategies of request bodies, by path: `VALID` make sense, `BOLD` may be refused.

`ruined` takes sense away from either.
"""

import copy
import json

from hypothesis import strategies as st

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        [
            *("auto", "named:x", "x-anthropic-billing-header: a", "data:image/png;base64,AA==", "\ud800"),
            *("document", "search_result", "compaction", "tool_reference", "robot", "application/pdf"),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)

# --------------------------------------------------------------------------- requests that make sense

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
name = st.sampled_from(["read", "write"])
schema = st.dictionaries(text, st.integers() | text | st.lists(text, max_size=2), max_size=2)


def block(kind: str, **fields):
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


text_block = block("text", text=text)
source = block("base64", media_type=st.just("image/png"), data=st.just("AAAA"))
image_block = block("image", source=source)
tool_use = block("tool_use", id=text, name=name, input=schema)
reference = block("tool_reference", tool_name=name)
text_sources = (
    block("text", media_type=st.just("text/plain"), data=text)
    | block("content", content=text | st.lists(text_block, max_size=2))
    | block("base64", media_type=st.just("text/markdown"), data=st.sampled_from(["", "YQ==", "w6k="]))
)
document = st.fixed_dictionaries(
    {"type": st.just("document"), "source": text_sources},
    optional={"title": text | st.none(), "context": text, "citations": st.just({"enabled": True})},
)
search_result = block("search_result", source=text, title=text, content=st.lists(text_block, max_size=2))
browser_state = block("browser_state", tabs=st.lists(st.dictionaries(text, text, max_size=2), max_size=2))
tool_result = block(
    "tool_result",
    tool_use_id=text,
    content=text
    | st.lists(
        text_block | image_block | reference | document | search_result | browser_state,
        max_size=2,
    ),
)
tool_definition = block(
    "tool_definition", definition=st.fixed_dictionaries({"name": name, "input_schema": schema})
)
tool_change = block("tool_addition", tool=block("tool_reference", name=name) | tool_definition) | block(
    "tool_removal", tool=block("tool_reference", name=name) | block("mcp_toolset_reference", server_name=name)
)
summary = st.fixed_dictionaries(
    {"type": st.just("compaction"), "content": text | st.none()},
    optional={"tool_changes": st.lists(tool_change, max_size=2)},
)
at_server = block("server_tool_use", id=text, name=name, input=schema) | block(
    "mcp_tool_result", content=text
)
thinking = block("thinking", thinking=text, signature=text)
file = {"file_data": "data:text/plain;base64,aGk=", "filename": "a.txt"}
image_url = block("image_url", image_url=st.just({"url": "data:image/png;base64,AAAA"}))


def message(role: str, content, **more):
    return st.fixed_dictionaries({"role": st.just(role), "content": content, **more})


anthropic_messages = st.lists(
    message(
        "user",
        text | st.lists(text_block | image_block | tool_result | document | search_result, max_size=3),
    )
    | message(
        "assistant", text | st.lists(text_block | tool_use | thinking | at_server | summary, max_size=3)
    )
    | message("system", text | st.lists(text_block | tool_change, max_size=2))
    | message("system", text, clear_at=st.sampled_from(["never", "next_user_message"])),
    max_size=4,
).map(lambda messages: [*messages, {"role": "user", "content": "hi"}])
function_call = st.fixed_dictionaries({"name": name, "arguments": schema.map(json.dumps)})
call = block("function", id=text, function=function_call) | block(
    "custom", id=text, custom=st.fixed_dictionaries({"name": st.just("patch"), "input": text})
)
openai_messages = st.lists(
    message("user", text | st.lists(text_block | image_url | block("file", file=st.just(file)), max_size=3))
    | message("assistant", text | st.none(), tool_calls=st.lists(call, max_size=2), reasoning_content=text)
    | message("tool", text | st.lists(text_block, max_size=2), tool_call_id=text)
    | message("developer", text),
    min_size=1,
    max_size=4,
)
anthropic_tool = st.fixed_dictionaries(
    {"name": name, "input_schema": schema},
    optional={"defer_loading": st.booleans(), "input_examples": st.lists(schema, max_size=2)},
) | st.sampled_from(
    [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "defer_loading": True},
        {"type": "memory_20250818"},
    ]
)
openai_tool = block("function", function=st.fixed_dictionaries({"name": name, "parameters": schema})) | block(
    "custom", custom=st.just({"name": "patch", "format": {"type": "text"}})
)

common = {
    "stream": st.booleans(),
    "max_tokens": st.integers(1, 9),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 9),
}
openai_common = {
    **common,
    "stop": st.text(min_size=1, max_size=3).filter(str.isascii),
    "logit_bias": st.dictionaries(st.integers(0, 9).map(str), st.integers(-9, 9), max_size=2),
    "seed": st.integers(-9, 9),
    "stream_options": st.just({"include_usage": True}),
    "response_format": st.just({"type": "text"}),
}
anthropic_body = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": anthropic_messages},
    optional={
        **common,
        "system": text | st.lists(text_block, max_size=2),
        "tools": st.lists(anthropic_tool, max_size=2),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "none"}]),
        "stop_sequences": st.just(["a"]),
        "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}]),
        "metadata": st.just({"user_id": "{}"}),
    },
)
VALID = {
    "/v1/messages": anthropic_body,
    "/v1/messages/count_tokens": anthropic_body,
    "/v1/chat/completions": st.fixed_dictionaries(
        {"model": st.just("tiny"), "messages": openai_messages},
        optional={
            **openai_common,
            "tools": st.lists(openai_tool, max_size=2),
            "tool_choice": st.sampled_from(["auto", "none"]),
            "chat_template_kwargs": st.just({"enable_thinking": True, "style": [1]}),
            "reasoning_effort": st.sampled_from(["none", "high"]),
            "logprobs": st.just(True),
            "n": st.just(1),
        },
    ),
    "/v1/completions": st.fixed_dictionaries(
        {
            "model": st.just("tiny"),
            "prompt": st.sampled_from(["Once", ["Once"], [1, 2], [[1, 2]], ["a", "b", [3]]]),
        },
        optional={**openai_common, "logprobs": st.integers(0, 5)},
    ),
}

input_file = {"type": "input_file", **file}
responses_items = st.lists(
    message("user", text | st.lists(block("input_text", text=text) | st.just(input_file), max_size=2))
    | message("developer", text)
    | message("assistant", st.lists(block("output_text", text=text), max_size=2))
    | block("function_call", call_id=text, name=name, arguments=schema.map(json.dumps))
    | block("function_call_output", call_id=text, output=text)
    | block("reasoning", summary=st.just([]), encrypted_content=st.none()),
    min_size=1,
    max_size=4,
)
responses_items = responses_items.map(lambda items: [{"role": "user", "content": "hi"}, *items])
responses_tool = block("function", name=name, parameters=schema) | st.sampled_from(
    [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": []},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
    ]
)
VALID["/v1/responses"] = st.fixed_dictionaries(
    {"model": st.just("tiny"), "input": text.filter(bool) | responses_items},
    optional={
        "stream": st.booleans(),
        "max_output_tokens": st.integers(1, 9),
        "temperature": st.floats(0, 2),
        "instructions": text,
        "tools": st.lists(responses_tool, max_size=2),
        "tool_choice": st.sampled_from(["auto", "none"]),
        "store": st.booleans(),
        "reasoning": st.sampled_from([{"effort": "none"}, {"effort": "high"}]),
        "include": st.just(["reasoning.encrypted_content"]),
        "prompt_cache_key": text,
    },
)

VALID["/api/v1/chat"] = st.fixed_dictionaries(
    {
        "model": st.just("tiny"),
        "input": text.filter(bool)
        | st.lists(
            block("message", content=text.filter(bool))
            | block("image", data_url=st.just("data:image/png;base64,AAAA")),
            min_size=1,
            max_size=2,
        ),
    },
    optional={
        "stream": st.booleans(),
        "system_prompt": text,
        "temperature": st.floats(0, 2),
        "top_k": st.integers(1, 64),
        "max_output_tokens": st.integers(1, 9),
        "reasoning": st.sampled_from(["off", "on", "low"]),
        "store": st.booleans(),
        "context_length": st.integers(1000, 9000),
    },
)

gemini_call = st.fixed_dictionaries({"name": st.just("read"), "args": schema})
gemini_part = st.fixed_dictionaries({"text": text}, optional={"thoughtSignature": text}) | st.just(
    {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
)
gemini_contents = st.lists(
    st.fixed_dictionaries({"parts": st.lists(gemini_part, max_size=3)}, optional={"role": st.just("user")})
    | st.fixed_dictionaries({"role": st.just("model"), "parts": st.just([{"text": "a", "thought": True}])})
    | gemini_call.map(lambda call: {"role": "model", "parts": [{"functionCall": call}]}),
    max_size=4,
).map(lambda contents: [*contents, {"parts": [{"text": "hi"}]}])
VALID["/v1beta/models/tiny:generateContent"] = st.fixed_dictionaries(
    {"contents": gemini_contents},
    optional={
        "systemInstruction": st.fixed_dictionaries(
            {"parts": st.lists(st.fixed_dictionaries({"text": text}))}
        ),
        "tools": st.lists(
            st.fixed_dictionaries(
                {
                    "functionDeclarations": st.lists(
                        st.fixed_dictionaries({"name": name, "parameters": schema})
                    )
                }
            ),
            max_size=1,
        ),
        "generationConfig": st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.floats(0, 2),
                "maxOutputTokens": st.integers(1, 9),
                "topK": st.integers(1, 64),
                "stopSequences": st.just(["x"]),
                "thinkingConfig": st.sampled_from([{"thinkingBudget": 0}, {"includeThoughts": True}]),
            },
        ),
    },
)

# --------------------------------------------------------------------------- and that ask for a lot

json_schema = st.recursive(
    st.sampled_from(
        [
            *({}, True, {"type": "string"}, {"type": "integer", "minimum": 3}, {"type": "null"}),
            *({"enum": ["a", 1, None]}, {"const": "x"}, {"type": ["string", "null"]}),
            *({"type": "string", "pattern": "^[a-z]+$"}, {"type": "string", "pattern": "(?<=a)[("}),
            *({"type": "string", "minLength": 5, "maxLength": 2}, {"type": "string", "format": "date"}),
            *({"$ref": "#/$defs/no"}, {"$ref": "#"}, {"type": "robot"}, {"enum": []}, {"not": {}}),
            {"type": "number", "multipleOf": 0},
        ]
    ),
    lambda inner: st.one_of(
        st.dictionaries(text, inner, max_size=3).map(lambda p: {"type": "object", "properties": p}),
        st.dictionaries(text, inner, min_size=1, max_size=2).map(
            lambda p: {
                "type": "object",
                "properties": p,
                "required": [*p, "more"],
                "additionalProperties": False,
            }
        ),
        inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 3}),
        st.lists(inner, max_size=2).map(lambda choices: {"anyOf": choices}),
        st.lists(inner, max_size=2).map(lambda choices: {"allOf": choices}),
    ),
    max_leaves=5,
)
chat_format = st.just({"type": "json_object"}) | json_schema.map(
    lambda s: {"type": "json_schema", "json_schema": {"name": "n", "schema": s, "strict": True}}
)
forced = st.sampled_from(
    ["required", {"type": "function", "function": {"name": "read"}}, {"type": "function", "name": "read"}]
)
bold_function = st.fixed_dictionaries({"name": name, "parameters": json_schema})
grammar = st.fixed_dictionaries(
    {
        "syntax": st.sampled_from(["lark", "regex", "ebnf"]),
        "definition": st.sampled_from(['start: "a"+', "[a-z]+", "start: b", "(", ""]),
    }
)
custom_tool = st.fixed_dictionaries({"name": name}, optional={"format": block("grammar", grammar=grammar)})
bold_tool = block("function", function=bold_function) | block("custom", custom=custom_tool)
BOLD = {
    "/v1/chat/completions": st.fixed_dictionaries(
        {"model": st.just("tiny"), "messages": openai_messages, "max_tokens": st.integers(1, 40)},
        optional={
            "stream": st.booleans(),
            "response_format": chat_format,
            "tools": st.lists(bold_tool, min_size=1, max_size=2),
            "functions": st.lists(bold_function, max_size=1),
            "function_call": st.sampled_from(["auto", {"name": "read"}]),
            "tool_choice": forced,
            "parallel_tool_calls": st.booleans(),
            "logprobs": st.booleans(),
            "top_logprobs": st.integers(0, 21),
            "n": st.integers(0, 3),
            "presence_penalty": st.floats(-3, 3),
            "logit_bias": st.dictionaries(
                st.sampled_from(["1", "4095", "99999", "x"]), st.integers(-200, 200)
            ),
        },
    ),
    "/v1/completions": st.fixed_dictionaries(
        {
            "model": st.just("tiny"),
            "prompt": st.sampled_from(["Once", [1, 99999], [-1], [], ["a", [99999]], ["a", ""]]),
        },
        optional={
            "max_tokens": st.integers(0, 9),
            "response_format": chat_format,
            "echo": st.booleans(),
            "logprobs": st.integers(-1, 9),
            "n": st.integers(0, 3),
            "best_of": st.integers(0, 3),
        },
    ),
    "/v1/responses": st.fixed_dictionaries(
        {
            "model": st.just("tiny"),
            "input": responses_items | st.lists(block("item_reference", id=text), max_size=2),
            "max_output_tokens": st.integers(1, 40),
        },
        optional={
            "stream": st.booleans(),
            "text": json_schema.map(
                lambda s: {"format": {"type": "json_schema", "name": "n", "schema": s, "strict": True}}
            ),
            "tools": st.lists(block("function", name=name, parameters=json_schema, strict=st.booleans())),
            "tool_choice": forced,
            "previous_response_id": text,
        },
    ),
    "/v1/messages": st.fixed_dictionaries(
        {"model": st.just("tiny"), "messages": anthropic_messages, "max_tokens": st.integers(1, 40)},
        optional={
            "stream": st.booleans(),
            "tools": st.lists(st.fixed_dictionaries({"name": name, "input_schema": json_schema}), max_size=2),
            "tool_choice": st.sampled_from([{"type": "any"}, {"type": "tool", "name": "read"}]),
            "output_config": json_schema.map(lambda s: {"format": {"type": "json_schema", "schema": s}}),
            "thinking": st.sampled_from([{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1}]),
        },
    ),
}
"""Bodies that a server may serve or refuse, each for its own reasons."""

# --------------------------------------------------------------------------- and their ruin


def places(value):
    """Every (container, key) in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def ruined(data, body):
    body = copy.deepcopy(body)  # A strategy may hand out the same list every time.
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(list(places(body))))
        if data.draw(st.booleans()):
            container[key] = data.draw(junk)
        else:
            del container[key]
        if not body:
            break
    return body
