"""Why tests of llama.cpp's server fail against ours: what belongs to llama.cpp alone, and why.

A row is (pattern of the test's name, pattern of what it said, reason); the first that fits counts. A
failure that fits none is a gap of ours.
"""

from __future__ import annotations

import re

WORDS = "its own model's words or token counts"
ENDPOINT = "an endpoint that only llama.cpp has"
FIELD = "a field that only llama.cpp has"
FLAG = "a flag at its start"
CHOICE = "we chose otherwise"
DOWNLOAD = "it downloads"

ROWS: tuple[tuple[str, str, str], ...] = (
    ("", r"huggingface\.co|ProxyError", DOWNLOAD),
    ("", r"there is no such path", ENDPOINT),
    ("", r"assert \(?404 ==|got 404", ENDPOINT),
    ("test_consistent_result|test_different_result", r"KeyError: 'content'", f"{ENDPOINT}: /completion"),
    ("test_cancel_request", r"KeyError: 0", f"{ENDPOINT}: /slots"),
    ("test_no_ui", r"doctype", f"{ENDPOINT}: a page for browsers"),
    ("test_server_models$", "tinyllama-2", f"{FLAG}: the model's alias"),
    ("test_server_model_aliases_and_tags", "aliases", f"{FIELD}: aliases and tags of a model"),
    ("test_server_multiple_addresses", "assert False", f"{FLAG}: two addresses at once"),
    ("", r"'timings'|'truncated'|'__verbose'|'generation_settings'", FIELD),
    ("test_return_progress", "", f"{FIELD}: return_progress"),
    ("test_responses_stream_with_llama_telemetry", "", f"{FIELD}: progress and timings of /v1/responses"),
    (
        "test_chat_completion_stream|timings_per_token|without_tool_call_fast|test_logprobs_stream",
        r"assert '' is None|non empty content delta",
        f"{CHOICE}: a stream's first chunk has the content '', as OpenAI's; llama.cpp's has null",
    ),
    (
        "test_chat_completion|test_completion_with_openai_library",
        r"system_fingerprint|is not None\)",
        f"{FIELD}: its build as system_fingerprint",
    ),
    ("test_completion_with_grammar", "", f"{FIELD}: grammar, as GBNF; refused by name"),
    (
        r"test_invalid_chat_completion_req\[messages7\]",
        "assert",
        f"{CHOICE}: two assistant messages in a row are joined",
    ),
    ("test_context_size_exceeded", "", f"{FLAG}: a context of 512 tokens"),
    ("test_anthropic_.*(image|vision)", "400 == 500", f"{CHOICE}: an image is refused with 400, not 500"),
    ("test_anthropic_empty_messages", "400 == 200", f"{CHOICE}: no messages are refused, as by Anthropic"),
    ("test_incorrect_api_key", "200 == 401", f"{FLAG}: --api-key"),
    ("test_correct_api_key", "'content' in", f"{FIELD}: its own shape of /completions"),
    ("test_cors", "405 == 200", f"{CHOICE}: no page of a browser may ask unless --cors-origins names it"),
    ("test_local_media_file", "400 == 200", f"{FLAG}: a folder of media"),
    ("", r"match_regex|(prompt|completion)_tokens|n_prompt|n_predicted|Suddenly", WORDS),
)


def reason_of(name: str, said: str) -> str:
    """The reason of a failure, or `gap: …` with its first line."""
    for test, words, reason in ROWS:
        if re.search(test, name) and re.search(words, said):
            return reason
    lines = [line[1:].strip() for line in said.splitlines() if line.startswith("E")]
    return f"gap: {(lines or [said.strip()])[0][:160]}"
