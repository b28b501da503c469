"""Images in the messages that a chat template gets, for templates of several kinds."""

from __future__ import annotations

from typing import Any

import pytest

from omlxd.chat import Conversation, ImagePart, Message, Part, TextPart, ToolCallPart, ToolResultPart
from omlxd.engine.prompt.template.messages import template_messages
from omlxd.engine.prompt.template.traits import IMAGE, TemplateTraits, probe
from omlxd.errors import InvalidRequest

SEES = TemplateTraits(image="<image>", tool_images=True)
PICTURE = ImagePart(b"png")


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: str | Part) -> Message:
    return Message("user", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def contents(traits: TemplateTraits, *messages: Message) -> list[tuple[str, Any]]:
    rendered, _ = template_messages(Conversation(messages), traits)
    return [(message["role"], message["content"]) for message in rendered]


def test_images_stand_between_texts_as_the_client_sent_them():
    asked = user("one", "two", PICTURE, "three", PICTURE)
    assert contents(SEES, asked) == [("user", [text("one\ntwo"), IMAGE, text("three"), IMAGE])]
    assert contents(SEES, user("one", "two")) == [("user", "one\ntwo")]


def test_neighbours_of_one_role_are_joined_with_their_images():
    traits = TemplateTraits(image="<image>", repeats=False)
    assert contents(traits, user("one"), user("two", PICTURE), user("three"), user("four")) == [
        ("user", [text("one\n\n"), text("two"), IMAGE, text("three\n\n"), text("four")])
    ]


CALL = Message("assistant", (ToolCallPart("call-1", "read", {}),))
RESULT = Message("tool", (ToolResultPart("call-1", "a.png", images=(PICTURE,)),))
RESPONSE = "<tool_response>\na.png\n</tool_response>"


@pytest.mark.parametrize(
    ("traits", "wanted"),
    [
        (SEES, [("tool", [text("a.png"), IMAGE])]),
        (TemplateTraits(image="<image>"), [("tool", "a.png"), ("user", [IMAGE])]),
        (TemplateTraits(image="<image>", tool_role=False), [("user", [text(RESPONSE), IMAGE])]),
    ],
)
def test_images_of_a_tools_result_stand_where_the_template_shows_them(traits: TemplateTraits, wanted: Any):
    assert contents(traits, user("Read"), CALL, RESULT)[2:] == wanted


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_of_others_are_refused(role: Any):
    with pytest.raises(InvalidRequest, match=role):
        contents(SEES, user("Look"), Message(role, (PICTURE,)))


def test_what_a_template_writes_for_an_image_is_probed():
    def apply(messages: list[dict[str, Any]], tools: Any = None) -> str:
        """As Qwen2.5-VL's: no tools, no calls, images in any role."""
        out = ""
        for message in messages:
            content = message["content"]
            parts = [text(content)] if isinstance(content, str) else content
            shown = "".join(
                "<start><pad><end>" if part["type"] == "image" else part["text"] for part in parts
            )
            out += f"[{message['role']}]{shown}\n"
        return out

    assert probe(apply).image == ""
    traits = probe(apply, images=True)
    assert traits.image == "<start><pad><end>" and not traits.tool_images and not traits.content_parts
