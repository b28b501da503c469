"""The demo model and the test families: same bytes each time, loadable, and sane to talk to."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import families
import mlx.core as mx
import pytest
from fast_or_slow import SOME_FAMILIES, rest_slow
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from omlxd.engine.mlx_adapter.cache.kinds import leaves
from omlxd.errors import ModelError
from omlxd.models import demo

WEIGHTS_OF_VERSION_1 = "90de79272dff776ebc118620b2f524f307602a1740f2f1152c69c9e45abb319f"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return demo.build_demo(tmp_path_factory.mktemp("demo") / "omlxd-demo")


@pytest.fixture(scope="module")
def loaded(built):
    return load(str(built))


def greedy(model, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


# --------------------------------------------------------------------------- building


def test_every_build_gives_the_same_bytes(built, tmp_path):
    # Another process, so that nothing cached or hash-ordered is shared.
    done = subprocess.run(
        [sys.executable, "-m", "omlxd.models.demo", str(tmp_path / "again")],
        capture_output=True,
        text=True,
        cwd=Path(demo.__file__).parents[2],
        env={"PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"},
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(built)
    assert set(digests(built)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "omlxd_demo.json",
    }


def test_the_weights_are_the_ones_of_this_version(built):
    # A rebuilt demo must keep its KV namespace: raise demo.VERSION when this changes.
    assert demo.VERSION == 1
    assert digests(built)["model.safetensors"] == WEIGHTS_OF_VERSION_1


def test_a_built_demo_is_left_alone(built):
    before = (built / "model.safetensors").stat().st_mtime_ns
    assert demo.build_demo(built) == built
    assert (built / "model.safetensors").stat().st_mtime_ns == before


def test_an_older_demo_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / demo.MARKER).write_text('{"version": 0, "note": ""}')
    (folder / "model.safetensors").write_text("old")
    demo.build_demo(folder)
    assert demo.is_demo(folder)
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_folder_of_something_else_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="not empty"):
        demo.build_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="can't build the demo model"):
        demo.build_demo(tmp_path / "file" / "demo")


def test_the_marker_says_what_the_model_is(built):
    assert json.loads((built / demo.MARKER).read_text()) == {
        "version": demo.VERSION,
        "note": "random weights: its words mean nothing",
    }


# --------------------------------------------------------------------------- tokenizer


def test_every_id_decodes_and_streams(loaded):
    _, tokenizer = loaded
    assert len(tokenizer) == demo.VOCAB
    for index in range(len(tokenizer)):
        detokenizer = tokenizer.detokenizer
        detokenizer.add_token(index)
        detokenizer.finalize()
        assert isinstance(tokenizer.decode([index]), str)


def test_specials_are_one_token_and_found_by_mlx_lm(loaded):
    _, tokenizer = loaded
    for special in demo.SPECIALS:
        assert len(tokenizer.encode(special)) == 1
    assert tokenizer.has_thinking and tokenizer.think_start == "<think>"
    assert tokenizer.has_tool_calling and tokenizer.tool_call_start == "<tool_call>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in tokenizer.eos_token_ids


@pytest.mark.parametrize("text", ['Grüße, 世界 🙂\n\tdef f(x):\n        return {"a": [1, 2.5]}', demo.PROSE])
def test_text_survives_the_tokenizer(loaded, text):
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_agents_prompt_takes_three_characters_a_token(loaded):
    _, tokenizer = loaded
    assert len(demo.PROSE) / len(tokenizer.encode(demo.PROSE)) > 3


# --------------------------------------------------------------------------- behaviour


@pytest.mark.slow
def test_it_thinks_and_then_answers_and_stops(loaded):
    model, tokenizer = loaded
    ends = 0
    for text in ("Hello", "Write a function", "What is 2+2?", "Tell me a story"):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        out = greedy(model, prompt, 250)
        assert len(set(out)) > 20  # no loop of one word
        assert tokenizer.think_end_id in out
        ends += any(token in tokenizer.eos_token_ids for token in out)
    assert ends >= 1


@pytest.mark.parametrize("family", rest_slow(families.FAMILIES, *SOME_FAMILIES))
def test_a_family_loads_generates_and_sees_its_whole_prompt(family, tmp_path):
    folder = families.build_family(family, tmp_path / family)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < 2_000_000
    model, tokenizer = load(str(folder))
    caches = {type(leaf).__name__ for _, leaf in leaves(make_prompt_cache(model))}
    assert caches == families.CONFIGS[family].classes

    tokens = tokenizer.encode(demo.PROSE)[:96]
    out = greedy(model, tokens, 24)
    assert len(set(out)) > 8
    assert not set(out) & tokenizer.eos_token_ids
    assert tokenizer.decode(out)

    other = [tokens[0] + 1, *tokens[1:]]
    logits, changed = (model(mx.array([ids]))[0, -1] for ids in (tokens, other))
    assert mx.abs(logits - changed).max().item() > 1e-3


def test_families_are_the_same_every_time(tmp_path):
    one = families.build_family("qwen3", tmp_path / "one", dtype="bf16")
    two = families.build_family("qwen3", tmp_path / "two", dtype="bf16")
    assert digests(one) == digests(two)
    with pytest.raises(ValueError):
        families.build_family("qwen3_moe", tmp_path / "three", dtype="bf16")
