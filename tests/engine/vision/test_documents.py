"""PDFs of a conversation become text, or pictures for a model that sees: the same bytes always the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from media_files import locked_pdf, pdf

from omlxd.chat import Conversation, DocumentPart, ImagePart, Message, TextPart, ToolResultPart, media_of
from omlxd.common.child_process import ChildLost
from omlxd.engine.prompt.canonical import chain_of
from omlxd.engine.vision import media as media_room
from omlxd.engine.vision.documents import read_documents
from omlxd.engine.vision.media import Media, TimeLeft, keyed
from omlxd.errors import InvalidRequest

pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")

DATA = pdf(["A kettle boils.", ""])
PDF = "application/pdf"


@pytest.fixture(scope="module")
def media():
    made = Media()
    yield made
    made.close()


def talk_with(*parts) -> Conversation:
    return Conversation((Message("user", (TextPart("read it"), *parts, TextPart("and answer"))),))


def document(data: bytes = DATA, name: str = "kettles.pdf", context: str = "") -> DocumentPart:
    return DocumentPart(data, PDF, name, context, "messages.0.content.1.source")


def test_a_model_of_text_reads_the_text_of_each_page(media):
    [message] = read_documents(talk_with(document(context="from the shop")), media, sees=False).messages
    assert message.parts == (
        TextPart("read it"),
        TextPart(
            "<document>\n<title>kettles.pdf</title>\n<context>from the shop</context>\n<document_content>\n"
            "[page 1]\nA kettle boils.\n[page 2]\n(no text on this page)\n</document_content>\n</document>"
        ),
        TextPart("and answer"),
    )


def test_a_model_that_sees_gets_a_picture_of_each_page(media):
    conversation = read_documents(talk_with(document(name="")), media, sees=True)
    [message] = conversation.messages
    at = "messages.0.content.1.source"
    assert message.parts == (
        TextPart("read it"),
        TextPart("<document>\n<document_content>"),
        ImagePart(DATA, PDF, at, 1),
        ImagePart(DATA, PDF, at, 2),
        TextPart("</document_content>\n</document>"),
        TextPart("and answer"),
    )
    one, two = media.identities(keyed([part for part in message.parts if isinstance(part, ImagePart)]))
    assert (one.width, one.height) == (two.width, two.height) and one.digest != two.digest
    assert len(media.pages(document())) == 2


@pytest.mark.parametrize("sees", [True, False])
def test_a_pdf_in_a_result_stays_in_it(media, sees):
    image = ImagePart(b"png", "image/png")
    result = ToolResultPart("c", "read:", images=(image,), documents=(document(), document(name="again")))
    asked = Conversation((Message("tool", (result,)),))
    [message] = read_documents(asked, media, sees=sees).messages
    [read] = message.parts
    assert isinstance(read, ToolResultPart) and not read.documents
    assert read.text.startswith("read:\n<document>\n<title>kettles.pdf</title>\n<document_content>\n")
    assert read.text.count("A kettle boils.") == (0 if sees else 2)
    assert [each.page for each in read.images] == ([0, 1, 2, 1, 2] if sees else [0])


def test_a_conversation_without_documents_stays_as_it_is(media):
    asked = talk_with(ImagePart(b"png"))
    assert read_documents(asked, media, sees=False) == asked


@pytest.mark.parametrize("sees", [True, False])
def test_a_locked_pdf_is_an_error_with_its_name_and_its_field(media, sees):
    with pytest.raises(InvalidRequest, match=r"the PDF 'kettles.pdf' is locked") as caught:
        read_documents(talk_with(document(locked_pdf())), media, sees=sees)
    assert caught.value.param == "messages.0.content.1.source"


def test_conversations_with_another_document_are_other_conversations():
    other = document(pdf(["A saucer."]))
    assert chain_of(talk_with(document())) == chain_of(talk_with(document(name="renamed")))
    assert chain_of(talk_with(document())) != chain_of(talk_with(other)) != chain_of(talk_with())
    results = [
        Conversation((Message("tool", (ToolResultPart("c", "", documents=(each,)),)),))
        for each in (document(), other)
    ]
    assert chain_of(results[0]) != chain_of(results[1])


def test_pages_count_as_images_where_they_are_pictures(media):
    data = pdf([""] * 60)
    pages = [DocumentPart(data, PDF, "k.pdf", "", f"messages.0.content.{i}.source") for i in range(2)]
    conversation = Conversation(messages=(Message("user", tuple(pages)),))
    assert len(read_documents(conversation, media, sees=False, most_images=1).messages) == 1
    assert len([*media_of(read_documents(conversation, media, sees=True).messages)]) == 120
    assert read_documents(conversation, media, sees=True, most_images=120)
    with pytest.raises(
        InvalidRequest, match="and has 120; leave out earlier ones, send a part of a PDF, or "
    ) as caught:
        read_documents(conversation, media, sees=True, most_images=119)
    assert caught.value.param == "messages.0.content.1.source"


@pytest.mark.parametrize("sees", [True, False])
def test_all_pdfs_of_a_request_have_a_time_together(monkeypatch: pytest.MonkeyPatch, sees: bool):
    """Of 20 s each a request with many would stand for as many minutes."""
    media, now, allowed = Media(), [0.0], []

    def call(_: object, reply: object, seconds: float) -> object:
        allowed.append(seconds)
        now[0] += seconds
        raise ChildLost("it did not end")

    monkeypatch.setattr(media._children, "call", call)
    monkeypatch.setattr(media_room, "time", SimpleNamespace(monotonic=lambda: now[0]))
    left = TimeLeft("PDF")
    for number in range(6):
        slow = document(DATA + b"%d" % number)
        with pytest.raises(InvalidRequest) as caught:
            (media.pages if sees else media.texts)(slow, left)
        assert caught.value.param == slow.param
    assert allowed == [20.0, 20.0, 20.0] and "the PDFs before this one took 60 s" in caught.value.message
