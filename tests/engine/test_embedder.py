"""Models that embed: numbers beside NumPy's, batches, limits, and what each kind of folder is taken for."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedders import EMBEDDERS, build_embedder, reference

from omlxd import wire
from omlxd.chat import Conversation, EmbedRequest, Message, RawPrompt, TextPart
from omlxd.engine.mlx_adapter.model.embedder import Embedder
from omlxd.engine.server import embedding
from omlxd.engine.server.embedding import EmbedderHost
from omlxd.errors import InvalidRequest
from omlxd.models.footprint import kind_of, read_config

TEXTS = ["a", "the kettle is on the stove", "saucers and spoons " * 5, "to be or not to be"]


def alone(embedder: Embedder, text: str, pair: str | None = None) -> np.ndarray:
    ids, types = embedder.tokens(text, pair)
    return embedder.compute([ids], [types])[0]


@pytest.mark.parametrize(
    ("family", "pooling"),
    [("bert", "mean_tokens"), ("bert", "cls_token"), ("qwen3", "lasttoken"), ("qwen3", "mean_tokens")],
)
def test_numbers_beside_numpy_s(family: str, pooling: str, tmp_path: Path):
    embedder = Embedder(build_embedder(family, tmp_path / "m", pooling), float32=False)
    for text in TEXTS:
        expected = reference(tmp_path / "m", embedder.tokens(text)[0], pooling)
        assert np.abs(alone(embedder, text) - expected).max() < 2e-6


@pytest.mark.parametrize("family", EMBEDDERS)
def test_a_row_is_the_same_alone_and_in_a_batch(family: str, tmp_path: Path):
    embedder = Embedder(build_embedder(family, tmp_path / "embed", ""), float32=True)
    assert embedder.kind == "embedding"
    ids, types = zip(*map(embedder.tokens, TEXTS), strict=True)
    together = embedder.compute(ids, types)
    assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-5
    for text, row in zip(TEXTS, together, strict=True):
        assert np.abs(alone(embedder, text) - row).max() < 2e-6
    assert np.abs(together[0] - together[1]).max() > 0.01


def test_embedding_gemmas_windows_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`tools/bench/embeddings.py --cosine` holds them against transformers'."""
    plain = Embedder(build_embedder("gemma3_text", tmp_path / "narrow"), float32=False)
    monkeypatch.setitem(EMBEDDERS, "gemma3_text", {**EMBEDDERS["gemma3_text"], "sliding_window": 96})
    wide = Embedder(build_embedder("gemma3_text", tmp_path / "wide"), float32=False)
    short, long = plain.tokens("a")[0], plain.tokens("saucers and spoons " * 8)[0]
    assert len(short) <= 8 and len(long) > 16
    for ids, same in ((short, True), (long, False)):
        one, two = (embedder.compute([ids], [[0] * len(ids)])[0] for embedder in (plain, wide))
        assert (np.abs(one - two).max() < 1e-6) == same


@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta"])
def test_a_reranker_scores_pairs(family: str, tmp_path: Path):
    embedder = Embedder(build_embedder(family, tmp_path / "m", scores=True), float32=False)
    assert embedder.kind == "rerank"
    ids, types = zip(*(embedder.tokens("kettle", text) for text in TEXTS), strict=True)
    if family == "xlm-roberta":
        types = [[0] * len(row) for row in ids]
    scores = embedder.compute(ids, types)
    assert scores.shape == (4, 1) and ((scores > 0) & (scores < 1)).all() and np.ptp(scores) > 1e-4
    assert np.abs(embedder.compute(ids[1:2], types[1:2]) - scores[1]).max() < 1e-6


def test_kinds_of_folders(tmp_path: Path):
    def kind(name: str, config: dict[str, Any], pools: bool = False) -> str:
        folder = tmp_path / name
        (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
        if pools:
            (folder / "1_Pooling" / "config.json").write_text("{}")
        return kind_of(folder, config)

    assert kind("a", {"model_type": "bert", "architectures": ["BertModel"]}) == "embedding"
    assert kind("b", {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}) == "rerank"
    assert kind("Qwen3-8B", {"model_type": "qwen3"}) == "chat"
    assert kind("Qwen3-Embedding-8B-4bit", {"model_type": "qwen3"}) == "embedding"
    assert kind("models--x--Qwen3-Embedding-8B/snapshots/abc", {"model_type": "qwen3"}) == "embedding"
    assert kind("Qwen3-Reranker-8B", {"model_type": "qwen3"}, pools=True) == "chat"
    assert kind("c", {"model_type": "gemma3_text"}, pools=True) == "embedding"
    assert kind("embed-me", {"model_type": "llama"}) == "chat" and read_config(tmp_path) == {}


# --------------------------------------------------------------------------- the host


class Host:
    """An EmbedderHost whose engine thread is a thread of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch | None = None):
        self.answers: queue.Queue[Any] = queue.Queue()
        self.made: queue.Queue[EmbedderHost] = queue.Queue()
        self.thread = threading.Thread(target=self._run, args=(folder,), daemon=True)
        self.thread.start()
        self.host = self.made.get(timeout=60)

    def _run(self, folder: Path) -> None:
        load = wire.Load(model_path=str(folder), model_id="m", cache=wire.CacheSettings())
        host = EmbedderHost(load, self.answers.put, lambda id, error: self.answers.put(error))
        self.made.put(host)
        host.run()

    def ask(self, wanted: bool = True, **fields: Any) -> Any:
        over = threading.Event()
        self.host.embed(wire.Embed(1, EmbedRequest(**fields)), lambda: wanted, over.set)
        answer = self.answers.get(timeout=60)
        assert over.wait(60)
        return answer

    def close(self) -> None:
        self.host.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory):
    made = Host(build_embedder("bert", tmp_path_factory.mktemp("host") / "m"))
    yield made
    made.close()


def rows(embedded: wire.Embedded) -> np.ndarray:
    return np.frombuffer(embedded.result.values, "<f4").reshape(-1, embedded.result.width)


def test_a_batch_is_progress(host: Host):
    """Else the front would take a long request for a stuck one."""
    before = host.host.progress
    host.ask(texts=tuple(TEXTS))
    host.ask(texts=tuple(TEXTS))  # The last batch may be counted behind its answer.
    assert host.host.progress > before


def test_a_request_comes_back_in_its_order_whatever_its_batches(host: Host, monkeypatch: pytest.MonkeyPatch):
    whole = rows(host.ask(texts=tuple(TEXTS)))
    monkeypatch.setattr(host.host, "_most", 30)
    before = host.host.steps
    embedded = host.ask(texts=tuple(TEXTS))
    assert host.host.steps - before > 2 and np.abs(rows(embedded) - whole).max() < 2e-6
    counts = [host.host.count(RawPrompt(text)) for text in TEXTS]
    assert embedded.result.tokens == sum(counts)
    ids = tuple(tuple(host.host._embedder.tokens(text)[0]) for text in TEXTS)
    assert np.abs(rows(host.ask(tokens=ids)) - whole).max() < 2e-6


def test_batches_hold_texts_of_like_length(monkeypatch: pytest.MonkeyPatch):
    assert list(embedding._batches([5, 1, 9, 1], 10)) == [[1, 3], [0], [2]]
    assert list(embedding._batches([20], 10)) == [[0]]
    monkeypatch.setattr(embedding, "BATCH_ROWS", 2)
    assert list(embedding._batches([1, 1, 1], 100)) == [[0, 1], [2]]


def test_dimensions_are_the_first_and_of_length_one(host: Host):
    whole, short = rows(host.ask(texts=("kettle",))), rows(host.ask(texts=("kettle",), dimensions=8))
    assert short.shape == (1, 8) and abs(np.linalg.norm(short) - 1) < 1e-6
    assert np.abs(short[0] / short[0][0] - whole[0][:8] / whole[0][0]).max() < 1e-4
    assert "32 numbers" in host.ask(texts=("kettle",), dimensions=33).message


def test_a_text_that_is_too_long_is_refused_or_cut(host: Host):
    long = "kettle " * 200
    with pytest.raises(InvalidRequest, match=r"input.1: \d+ tokens, and 96 are the most"):
        host.ask(texts=("a", long))
    cut = host.ask(texts=(long,), truncate=True)
    assert cut.result.tokens == 96
    for tokens in ((), (1,) * 97, (9999,)):
        with pytest.raises(InvalidRequest, match=r"input\.0"):
            host.ask(tokens=(tokens,))


def test_an_embedder_answers_no_prompts_and_scores_nothing(host: Host):
    with pytest.raises(InvalidRequest, match="makes vectors"):
        host.ask(texts=("a",), query="q")
    for refused in (host.host.start, host.host.explain):
        with pytest.raises(InvalidRequest, match="answers no prompts"):
            refused(None)
    with pytest.raises(InvalidRequest):
        host.host.count(Conversation((Message("user", (TextPart("x"),)),)))


def test_what_nobody_waits_for_is_not_computed(host: Host):
    before = host.host.steps
    host.host.embed(wire.Embed(2, EmbedRequest(("a",))), lambda: False, lambda: None)
    host.ask(texts=("b",))
    assert host.host.steps == before + 1
