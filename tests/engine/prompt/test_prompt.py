"""The prompt pipeline: templates of every temper, tokens that extend, and the demo's invertible turns."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
from growth import assert_linear
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace
from templates import GLM, HARMONY, QWEN3, QWEN3_THINKING

from omlxd.chat import (
    Conversation,
    ImagePart,
    Message,
    RawPrompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.engine.prompt.template.messages import template_messages
from omlxd.engine.prompt.template.traits import TemplateTraits
from omlxd.engine.prompt.turn_memory import Scope
from omlxd.errors import InvalidRequest, ModelError
from omlxd.models import demo

READ = Tool("Read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}})

STRICT = """{{- '<s>' }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{{- '[' + message.role + ']' }}{%- if loop.first and system is defined %}{{- system + '\\n\\n' }}{%- endif %}
{{- message.content }}{%- endfor %}"""
"""Roles alternate, one system message at the start, no tools, as Llama 2's and Mistral's early ones."""

NO_SYSTEM = """{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}
{%- endif %}{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('must alternate') }}{%- endif %}<{{ m.role }}>{{ m.content }}{%- endfor %}"""
"""As Gemma 2's."""

NINE = """{%- for m in messages %}{%- if m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
[RESULT {{ m.tool_call_id }}]{{ m.content }}{%- elif m.tool_calls %}{{ m.content }}[CALLS]
{%- for c in m.tool_calls %} {{ c.id }} {{ c.function.name }} {{ '' + c.function.arguments }}{%- endfor %}
{%- else %}{%- if m.role == 'user' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}
{{- raise_exception('user after tool') }}{%- endif %}[{{ m.role }}]{{ m.content }}{%- endif %}{%- endfor %}"""
"""As Mistral's with tools: short ids, arguments as text, no user message after a result."""

PARTS = """{%- for m in messages %}<{{ m.role }}>{%- for p in m.content %}
{%- if p.type == 'text' %}{{ p.text }}{%- endif %}{%- endfor %}{%- endfor %}"""
"""Content is a list of parts, as vision models have it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(path, demo.VOCAB)
    demo.write_json(path / "config.json", {"model_type": "qwen3"})
    return path


def pipeline(folder: Path, template: str | None = "keep", hoist: str = "never") -> PromptPipeline:
    tokenizer = load_tokenizer(folder)
    if template != "keep":
        tokenizer._tokenizer.chat_template = template
        tokenizer.has_chat_template = template is not None
    return PromptPipeline(tokenizer, hoist_system=hoist)


@pytest.fixture(scope="module")
def prompts(folder) -> PromptPipeline:
    return pipeline(folder)


def say(role, *parts) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


SESSION = (
    say("system", "You are an agent.", "Be brief."),
    say("user", "<system-reminder>\nthe date\n</system-reminder>", "Read a.txt"),
    say("system", "# Environment\nLinux"),
    say(
        "assistant", ThinkingPart("I should read it."), "Reading.", ToolCallPart("c1", "Read", {"path": "a"})
    ),
    say("tool", ToolResultPart("c1", "some text")),
    say("user", "and now?"),
    say("user", "well?"),
    say("assistant", ThinkingPart("Done."), "It says: some text"),
    say("system", "Context is getting full."),
    say("user", "Thanks"),
)
WORDS = (
    *("You are an agent.", "Be brief.", "the date", "Read a.txt", "# Environment", "Reading.", "Read"),
    *("some text", "and now?", "well?", "It says", "getting full", "Thanks"),
)


def in_order(text: str, words=WORDS) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


# --------------------------------------------------------------------------- the demo's template


def test_the_demo_takes_everything(prompts):
    assert prompts.traits.missing() == []
    assert prompts.notes == []
    rendered = prompts.render(Conversation(SESSION, tools=(READ,)))
    assert in_order(rendered.text)
    assert "I should read it." in rendered.text and "system-reminder>\n# Env" not in rendered.text
    assert rendered.starts_in_thinking and rendered.reasoning and rendered.tool_calls
    assert prompts._tokenizer.decode(rendered.tokens) == rendered.text


def test_every_turn_extends_the_one_before(prompts):
    """Tokens of turn k, without its generation prompt, begin the tokens of turn k+1."""
    start = prompts._tokenizer.convert_tokens_to_ids("<|im_start|>")
    for thinking in (True, False):
        before: list[int] = []
        for end in range(1, len(SESSION) + 1):
            conversation = Conversation(SESSION[:end], tools=(READ,), thinking=thinking)
            tokens = prompts.render(conversation).tokens
            assert tokens[: len(before)] == before
            generation_prompt = tokens[::-1].index(start) + 1
            before = tokens[:-generation_prompt]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_turn_as_generated_begins_the_next_prompt_to_the_last_token(prompts, thinking):
    start = prompts.render(Conversation((say("user", "Hi"),), tools=(READ,), thinking=thinking))
    assert start.starts_in_thinking is thinking
    generated = "The user wants a.\n</think>\n\n" if thinking else ""
    generated += 'Reading.\n<tool_call>\n{"name": "Read", "arguments": {"path": "a", "n": 1}}\n</tool_call>'
    produced = [*start.tokens, *prompts._tokenizer.encode(generated + "<|im_end|>")]
    parts = [ThinkingPart("The user wants a.")] if thinking else []
    answer = say("assistant", *parts, "Reading.", ToolCallPart("c1", "Read", {"path": "a", "n": 1}))
    following = (say("user", "Hi"), answer, say("tool", ToolResultPart("c1", "text")))
    tokens = prompts.render(Conversation(following, tools=(READ,), thinking=thinking)).tokens
    assert tokens[: len(produced)] == produced


def test_thinking_follows_the_request(prompts):
    hello = (say("user", "Hi"),)
    default, on, off = (prompts.render(Conversation(hello, thinking=t)) for t in (None, True, False))
    assert default.tokens == on.tokens != off.tokens
    assert on.starts_in_thinking and not off.starts_in_thinking


def test_a_template_that_never_opens_the_tag_starts_in_thinking_where_the_setting_says_so(folder):
    tokenizer = pipeline(folder, QWEN3)._tokenizer
    plain, opened = (PromptPipeline(tokenizer, starts_in_thinking=on) for on in (False, True))
    talk = Conversation((say("user", TextPart("Hi")),))
    assert not plain.render(talk).starts_in_thinking and opened.render(talk).starts_in_thinking
    assert opened.render(talk).tokens == plain.render(talk).tokens
    assert not opened.render(replace(talk, thinking=False)).starts_in_thinking
    begun = Conversation((*talk.messages, say("assistant", TextPart("So"))), continue_final=True)
    assert not opened.render(begun).starts_in_thinking
    tokenizer._think_start = tokenizer._think_end = None
    with pytest.raises(ModelError, match="no thinking tags"):
        PromptPipeline(tokenizer, starts_in_thinking=True)


def test_tool_choice(prompts):
    hello = (say("user", "Hi"),)
    auto = prompts.render(Conversation(hello, tools=(READ,)))
    none = prompts.render(Conversation(hello, tools=(READ,), tool_choice="none"))
    assert none.tokens == auto.tokens  # the prefix stays
    assert auto.tool_calls and not none.tool_calls
    assert not prompts.render(Conversation(hello)).tool_calls
    for choice in ("required", "named:Read"):
        forced = prompts.render(Conversation(hello, tools=(READ,), tool_choice=choice))
        assert forced.tokens == auto.tokens and forced.tool_calls


def test_schemas_keep_the_clients_key_order(prompts):
    schema = {"type": "object", "required": ["b"], "properties": {"b": {}, "a": {}}}
    text = prompts.render(Conversation((say("user", "Hi"),), tools=(Tool("T", "", schema),))).text
    assert '"required": ["b"], "properties": {"b": {}, "a": {}}' in text


def test_an_error_result_says_so_once(prompts):
    def shown(text: str) -> str:
        call, result = ToolCallPart("c", "Read", {}), ToolResultPart("c", text, is_error=True)
        messages = (say("user", "Hi"), say("assistant", call), say("tool", result))
        return prompts.render(Conversation(messages)).text

    assert "Error: no such file" in shown("no such file")
    assert "Error: an error" not in shown("an error occurred")


def test_images_are_refused(prompts):
    image = ImagePart(b"png", "image/png")
    for message in (say("user", image), say("tool", ToolResultPart("c", "", images=(image,)))):
        with pytest.raises(InvalidRequest, match="takes no images"):
            prompts.render(Conversation((message,)))


NAMES = """{%- for m in messages %}[{{ m.role }}]{%- if m.tool_calls %}{%- for c in m.tool_calls %}
{{- c.function.name }} {{ c.function.arguments }}{%- endfor %}{%- elif m.role == 'tool' %}
{{- m.name }}: {{ m.content }}{%- else %}{{ m.content }}{%- endif %}{%- endfor %}"""


def test_a_result_has_the_name_of_the_last_call_before_it_of_its_id(folder):
    def turn(name: str) -> tuple[Message, Message]:
        return say("assistant", ToolCallPart("call_0", name, {})), say("tool", ToolResultPart("call_0", "r"))

    told = (
        pipeline(folder, NAMES).render(Conversation((say("user", "Hi"), *turn("read"), *turn("write")))).text
    )
    assert told == "[user]Hi[assistant]read {}[tool]read: r[assistant]write {}[tool]write: r"


def test_nothing_to_say_is_refused(prompts):
    with pytest.raises(InvalidRequest, match="at least one message"):
        prompts.render(Conversation(()))


def test_template_arguments(prompts, folder):
    hello = (say("user", "Hi"),)
    assert prompts.render(Conversation(hello, template_args={"unknown": 1})).tokens
    off = prompts.render(Conversation(hello, template_args={"enable_thinking": False}))
    assert not off.starts_in_thinking
    documents = pipeline(folder, f"{QWEN3}{{{{ documents[0].text }}}}")
    told = documents.render(Conversation(hello, template_args={"documents": [{"text": "kettle"}]}))
    assert told.text.endswith("kettle")
    for name in ("chat_template", "tools", "tokenize", "_compile"):
        with pytest.raises(InvalidRequest, match="can't be set"):
            prompts.render(Conversation(hello, template_args={name: "x"}))


CHOOSY = """{%- if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}
{{- raise_exception('reasoning_effort must be none or high') }}{%- endif %}
{{- reasoning_effort | default('free') }}:{%- for m in messages %}{{ m.content }}{%- endfor %}"""


def test_effort_is_told_where_the_template_knows_the_word_and_passed_over_where_not(folder):
    choosy = pipeline(folder, CHOOSY)
    hello = (say("user", "Hi"),)
    for effort, told in (("high", "high:Hi"), ("medium", "free:Hi"), ("", "free:Hi")):
        assert choosy.render(Conversation(hello, effort=effort)).text == told
    # What the client says is above what the owner set for the model.
    assert choosy.render(
        Conversation(hello, effort="high", template_args={"reasoning_effort": "none"})
    ).text == ("high:Hi")
    assert pipeline(folder).render(Conversation(hello, effort="high")).tokens
    own = CHOOSY.replace("'none', ", "'extreme', ")
    asked = Conversation(hello, effort="extreme", effort_param="reasoning.effort")
    assert pipeline(folder, own).render(asked).text == "extreme:Hi"
    with pytest.raises(InvalidRequest, match=r"reasoning\.effort: 'extreme' is none of none, minimal"):
        choosy.render(asked)
    with pytest.raises(InvalidRequest, match="must alternate"):
        pipeline(folder, NO_SYSTEM).render(Conversation((say("assistant", "I begin"),), effort="high"))


def test_an_effort_among_the_templates_arguments_is_a_budget_where_it_has_no_word(folder):
    prompt = Conversation((say("user", "Hi"),), template_args={"reasoning_effort": "LOW"})
    assert pipeline(folder).render(prompt).thinking_budget == 1024
    assert pipeline(folder, CHOOSY.replace("not in", "in")).render(prompt).thinking_budget is None


def test_a_begun_answer_may_stand_in_a_thought(folder):
    for begun, thinks in (("<think>\nI think", True), ("<think>a</think>b", False), ("a <think> b", False)):
        talk = Conversation((say("user", "Hi"), say("assistant", begun)), continue_final=True)
        assert pipeline(folder).render(talk).starts_in_thinking is thinks, begun


THINKS_IN_TURN = """{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('must alternate') }}{%- endif %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{%- endif %}
{{- m.content }}{%- endfor %}"""


def test_the_thinking_of_answers_that_are_joined_is_kept(folder):
    one, two = say("assistant", ThinkingPart("hum"), "Yes"), say("assistant", ThinkingPart("ho"), "No")
    text = pipeline(folder, THINKS_IN_TURN).render(Conversation((say("user", "Hi"), one, two))).text
    assert text == "<user>Hi<assistant><think>hum\n\nho</think>Yes\n\nNo"


@pytest.mark.parametrize("apart", [False, True])
def test_many_texts_in_a_row_are_joined_in_linear_time(apart):
    def seconds(count: int) -> float:
        texts = ["A line of text " * 8] * count
        messages = tuple(say("user", text) for text in texts) if apart else (say("user", *texts),)
        asked = Conversation(messages)
        begin = time.process_time()
        template_messages(asked, TemplateTraits(repeats=False))
        return time.process_time() - begin

    assert_linear(seconds, 4_000)


# --------------------------------------------------------------------------- begun answers


@pytest.mark.parametrize(
    "template", ["keep", None, STRICT, NO_SYSTEM, NINE, PARTS, QWEN3, QWEN3_THINKING, GLM, HARMONY]
)
def test_a_begun_answer_is_the_prompts_end(folder, template):
    begun = pipeline(folder, template)
    for text in ("Once upon", "Once upon ", "Once <|im_end|> upon", "{"):
        said = (say("user", "Hi"), say("assistant", "Yes"), say("user", "Go"), say("assistant", text))
        rendered = begun.render(Conversation(said, continue_final=True), scope=Scope("s", ""))
        assert rendered.text.endswith(text) and not rendered.starts_in_thinking
        assert rendered.place is None, "the rest of an answer is no turn"
        closed = begun.render(Conversation((*said, say("user", "Well")))).text
        assert rendered.text.partition("Go")[0] == closed.partition("Go")[0]


IN_TURN_BUT_CALLS = """{%- set seen = namespace(n=0) %}{%- for m in messages %}
{%- if m.role == 'user' or not m.tool_calls %}
{%- if (m.role == 'user') != (seen.n % 2 == 0) %}{{- raise_exception('must alternate') }}{%- endif %}
{%- set seen.n = seen.n + 1 %}{%- endif %}
<{{ m.role }}>{{ m.content }}{{ m.tool_calls or '' }}{%- endfor %}"""
"""As Mistral's: calls and their results count for no turn."""


@pytest.mark.parametrize(
    "template", ["keep", None, STRICT, IN_TURN_BUT_CALLS, PARTS, QWEN3, QWEN3_THINKING, GLM, HARMONY]
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_call_before_a_begun_answer_is_not_lost(folder, template, apart):
    call = ToolCallPart("c1", "Read", {"path": "kestrel"})
    said = (say("assistant", call), say("assistant", "Once")) if apart else (say("assistant", call, "Once"),)
    talk = Conversation((say("user", "Hi"), *said), tools=(READ,), continue_final=True)
    try:
        text = pipeline(folder, template).render(talk).text
    except InvalidRequest:
        return
    assert "kestrel" in text and text.endswith("Once")


def test_a_template_that_hides_the_beginning_of_an_answer_is_refused(folder):
    hiding = pipeline(folder, "{%- for m in messages if m.role == 'user' %}{{ m.content }}{%- endfor %}")
    said = (say("user", "Hi"), say("assistant", "Once"))
    with pytest.raises(InvalidRequest, match="can't continue"):
        hiding.render(Conversation(said, continue_final=True))


# --------------------------------------------------------------------------- system messages


def test_system_messages_before_the_first_answer_are_hoisted_and_no_others(folder):
    for template in ("keep", STRICT):
        text = pipeline(folder, template, hoist="always").render(Conversation(SESSION, tools=(READ,))).text
        moved = ("Be brief.", "# Environment", "the date", "Read a.txt", "Reading.", "getting full", "Thanks")
        assert in_order(text, moved)
    assert PromptPipeline(load_tokenizer(folder)).render(Conversation(SESSION)).text == (
        pipeline(folder, hoist="always").render(Conversation(SESSION)).text
    )


def test_hoisting_changes_nothing_from_the_first_answer_on(folder):
    """Every later turn extends the one before, whatever system messages it brings."""
    prompts = pipeline(folder, hoist="always")
    answered = next(i for i, message in enumerate(SESSION) if message.role == "assistant") + 1
    before = ""
    for end in range(answered, len(SESSION) + 1):
        text = prompts.renderer.text(Conversation(SESSION[:end], tools=(READ,)), generation=False).plain
        assert text.startswith(before)
        before = text


# --------------------------------------------------------------------------- raw prompts


def test_a_raw_prompt_is_taken_as_it_is(prompts):
    rendered = prompts.render(RawPrompt("Once upon <think>"))
    assert prompts._tokenizer.decode(rendered.tokens) == "Once upon <think>"
    assert not rendered.starts_in_thinking and not rendered.reasoning and not rendered.tool_calls
    assert prompts.render(RawPrompt(tokens=(5, 6, 7))).tokens == [5, 6, 7]


# --------------------------------------------------------------------------- other templates


def test_the_load_log_names_what_a_user_would_miss(folder, caplog):
    """Tools; the rest is for developers."""
    caplog.set_level(logging.INFO)
    notes = pipeline(folder, STRICT).notes
    assert notes[0].startswith("its chat template has no tools: ") and "tool_role" not in "".join(notes)
    with_tools = "{{ tools | tojson if tools }}" + NINE
    assert not any("tool" in note for note in pipeline(folder, with_tools).notes) and not caplog.records
    caplog.set_level(logging.DEBUG, "omlxd")  # Whatever level another test has set.
    pipeline(folder, with_tools)
    assert "any_call_id" in caplog.text


@pytest.mark.parametrize("template", [STRICT, NO_SYSTEM, NINE, PARTS, None])
def test_any_template_gets_the_whole_conversation_in_order(folder, template):
    prompts = pipeline(folder, template)
    rendered = prompts.render(Conversation(SESSION, tools=(READ,)))
    assert in_order(rendered.text), rendered.text
    assert "Reads a file." in rendered.text


def test_a_strict_template(folder):
    prompts = pipeline(folder, STRICT)
    assert set(prompts.traits.missing()) == {
        *("system_repeats", "system_anywhere", "repeats", "tools", "tool_calls", "tool_role", "reasoning_key")
    }
    text = prompts.render(Conversation(SESSION)).text
    assert "<system-reminder>\n# Environment\nLinux\n</system-reminder>" in text
    assert text.count("[user]") == 3 and text.count("[assistant]") == 2
    assert '<tool_call>\n{"name": "Read", "arguments": {"path": "a"}}\n</tool_call>' in text
    assert "<tool_response>\nsome text\n</tool_response>\n\nand now?\n\nwell?" in text


def test_short_ids_and_text_arguments(folder):
    prompts = pipeline(folder, NINE)
    assert prompts.traits.arguments_text and not prompts.traits.any_call_id
    text = prompts.render(Conversation(SESSION)).text
    id = text.partition("[RESULT ")[2].partition("]")[0]
    assert len(id) == 9 and text.count(id) == 2
    assert '{"path": "a"}' in text
    assert "some text\n\nand now?" in text


def test_content_as_parts(folder):
    assert pipeline(folder, PARTS).traits.content_parts


def test_no_template_is_plain_text(folder):
    prompts = pipeline(folder, None)
    assert "no chat template" in prompts.notes[0]
    text = prompts.render(Conversation((say("system", "Be kind."), say("user", "Hi")))).text
    assert text == "System: Be kind.\n\nUser: Hi\n\nAssistant:"


def test_a_refusing_template_is_the_clients_error(folder):
    with pytest.raises(InvalidRequest, match="refuses this conversation: must alternate"):
        pipeline(folder, NO_SYSTEM).render(Conversation((say("assistant", "I begin"),)))


def test_a_broken_template_is_no_crash(folder):
    with pytest.raises(InvalidRequest, match="refuses this conversation"):
        pipeline(folder, "{{ messages[7].content.nothing() }}").render(Conversation((say("user", "Hi"),)))


def test_what_a_template_says_of_a_conversation_is_not_logged(folder, caplog):
    caplog.set_level("INFO")
    template = (
        "{% if messages[0].role == 'user' %}{{ raise_exception('no: ' ~ messages[0].content) }}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match="my secret"):
        pipeline(folder, template).render(Conversation((say("user", "my secret"),)))
    assert "refused a conversation" in caplog.text and "my secret" not in caplog.text


def test_what_a_template_says_as_it_fails_is_bounded(folder):
    """Real ones quote the message, a call's arguments, or all that they were given."""
    template = "{{ raise_exception('no: ' ~ messages[0].content) }}"
    with pytest.raises(InvalidRequest) as refused:
        pipeline(folder, template).render(Conversation((say("user", "x" * (4 << 20)),)))
    assert len(refused.value.message) < 2000 and "no: xxx" in refused.value.message


def test_switches_that_keep_thinking_are_set(folder):
    template = (
        "{%- if preserve_thinking %}KEPT{% endif %}{% if clear_thinking is defined %}{{ clear_thinking }}"
    )
    template += "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert pipeline(folder, template).render(Conversation((say("user", "Hi"),))).text == "KEPTFalseHi"


# --------------------------------------------------------------------------- threads and speed


def test_many_threads_render_at_once(prompts):
    wanted = prompts.render(Conversation(SESSION, tools=(READ,))).tokens
    failures: list[object] = []

    def work():
        for _ in range(20):
            try:
                if prompts.render(Conversation(SESSION, tools=(READ,))).tokens != wanted:
                    failures.append("other tokens")
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_agents_prompt_renders_quickly(prompts):
    messages = tuple(say(("user", "assistant")[i % 2], demo.PROSE) for i in range(16))
    conversation = Conversation(messages, tools=(READ,) * 20)
    start = time.thread_time()
    tokens = prompts.render(conversation).tokens
    took = time.thread_time() - start
    assert len(tokens) > 28_000
    assert took < 5.0  # 0.2 s is the goal, on a quiet machine
