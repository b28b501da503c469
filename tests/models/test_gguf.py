"""GGUF files become model folders whose logits are those of their dequantised weights."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from daemon import Daemon
from families import build_family
from fast_or_slow import rest_slow
from gguf import GGMLQuantizationType as Type
from gguf import quants
from gguf_files import write_gguf
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from omlxd.errors import ModelError
from omlxd.models.builder import part_folder, remove_leftovers
from omlxd.models.gguf import weights
from omlxd.models.gguf.header import TYPES, read_header
from omlxd.models.gguf.importing import import_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Rows of K-quants are multiples of 256."""
CASES = [
    ("llama", "llama", Type.Q4_0, {}),
    ("llama", "llama", Type.Q4_1, {}),
    ("llama", "llama", Type.F16, {}),
    ("llama", "llama", Type.Q4_K, WIDE),
    ("llama", "llama", Type.Q6_K, WIDE),
    ("qwen2", "qwen2", Type.Q5_0, {"num_attention_heads": 4, "head_dim": 16}),
    ("qwen3", "qwen3", Type.Q8_0, {}),
    ("qwen3", "qwen3", Type.BF16, {}),
    ("phi3", "phi3", Type.Q5_1, {}),
    ("gemma3_text", "gemma3", Type.Q8_0, {"sliding_window_pattern": 6, "num_hidden_layers": 6}),
    ("qwen3_moe", "qwen3moe", Type.F16, {}),
]


def small(family: str, folder: Path, changes: dict[str, object]) -> Path:
    if family == "qwen2":  # Not one of the suite's: its config is llama's.
        from family_configs import CONFIGS

        CONFIGS.setdefault("qwen2", CONFIGS["llama"])
    return build_family(family, folder, changes=changes)


@pytest.mark.parametrize(
    ("family", "arch", "kind", "changes"),
    rest_slow(CASES, *CASES[::3]),
    ids=lambda v: str(getattr(v, "name", v)),
)
def test_logits_are_those_of_the_dequantised_weights(family, arch, kind, changes, tmp_path, capsys):
    source = small(family, tmp_path / "source", changes)
    kept, file = write_gguf(source, tmp_path / "tiny.gguf", arch, kind)
    folder = import_gguf(file, tmp_path / "imported")

    tokens = mx.array([list(range(40, 80))])
    reference, _ = load_model(source)
    reference.load_weights([(name, mx.array(values)) for name, values in kept.items()])
    wanted = np.array(reference(tokens).astype(mx.float32))
    imported, _ = load_model(folder)
    imported.set_dtype(mx.float32)  # Stored values alone are compared, not a CPU's sums in 16 bits.
    got = np.array(imported(tokens).astype(mx.float32))
    difference, scale = np.abs(got - wanted).max(), np.abs(wanted).max()
    with capsys.disabled():
        print(f"\n{arch} {kind.name}: largest difference of logits {difference:.4f} of {scale:.2f}")
    # gemma3 is stored in bfloat16, and Q6_K is rounded once more, to 8 bits.
    assert difference < scale * (0.06 if arch == "gemma3" or kind is Type.Q6_K else 0.01)

    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(source)
    for text in ("Hello, world 1234\n\n  twice", "<|im_start|>user\nünïcode 🙂<|im_end|>"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert "<|im_end|>" in ours.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("name", list(weights.BITS))
def test_blocks_are_unpacked_as_ggml_does(name: str):
    number, kind = next((number, kind) for number, kind in TYPES.items() if kind.name == name)
    bits = np.random.default_rng(1)
    raw = bits.integers(0, 256, (64, kind.nbytes), dtype=np.uint8)
    halves = (bits.random((64, 2)) * 0.01).astype("<f2").view(np.uint8)
    if name == "Q6_K":
        raw[:, 208:] = halves[:, :2]
    else:
        raw[:, :4] = halves if name[-1] != "0" else np.concatenate([halves[:, :2], raw[:, 2:4]], axis=1)
    wanted = quants.dequantize(raw.reshape(-1), Type(number)).reshape(-1, weights.GROUP)
    affine = weights.unpack(name, raw)
    tolerance = np.ptp(wanted, axis=1, keepdims=True) / 255 if name == "Q6_K" else 1e-6
    assert (np.abs(affine.values() - wanted) <= tolerance).all()

    rows = affine.q.reshape(64, -1)
    packed = weights.pack(np.ascontiguousarray(rows), weights.BITS[name])
    scales, biases = (mx.array(part.reshape(64, -1)) for part in (affine.scale, affine.bias))
    unpacked = mx.dequantize(mx.array(packed), scales, biases, weights.GROUP, weights.BITS[name])
    assert np.allclose(np.array(unpacked).reshape(wanted.shape), affine.values(), atol=1e-6)


# --------------------------------------------------------------------------- files that are refused


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    _, file = write_gguf(build_family("llama", folder / "source"), folder / "good.gguf", "llama", Type.Q4_0)
    return file.read_bytes()


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(tensors: int, keys: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCH = string("general.architecture") + struct.pack("<I", 8) + string("llama")
HOSTILE = {
    "empty": (b"", "hostile.gguf can't be imported: it is empty; copy"),
    "wrong magic": (b"GGML" + bytes(64), "magic bytes"),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
    "huge tensor count": (header(1 << 60, 0), "claims"),
    "huge key count": (header(0, 1 << 60), "claims"),
    "huge list": (header(0, 1, string("a") + struct.pack("<IIQ", 9, 4, 1 << 60)), "items"),
    "lists of many": (
        header(0, 2, 2 * (string("a") + struct.pack("<IIQ", 9, 1, 2_500_000) + bytes(2_500_000))),
        "5000000 items",
    ),
    "huge list of strings": (header(0, 1, string("a") + struct.pack("<IIQ", 9, 8, 3_000_000)), "strings"),
    "huge string": (header(0, 1, struct.pack("<Q", 1 << 62)), "more than the file holds"),
    "nested lists": (header(0, 1, string("a") + struct.pack("<IIQ", 9, 9, 1)), "of type 9"),
    "five dimensions": (header(1, 0, tensor("a", (1,) * 5, 0, 0)), "5 dimensions"),
    "huge tensor": (header(1, 0, tensor("a", (1 << 40, 1 << 20), 0, 0)), "truncated"),
    "overlap": (
        header(2, 0, tensor("a", (8,), 0, 0) + tensor("b", (8,), 0, 16)) + bytes(200),
        "lies over another",
    ),
    "odd row": (header(1, 0, tensor("a", (33,), 2, 0)) + bytes(200), "shape"),
    "type": (header(1, 0, tensor("a", (256,), 10, 0)) + bytes(200), "Q2_K"),
    "architecture": (
        header(0, 1, ARCH.replace(b"llama", b"mamba")),
        "^hostile.gguf can't be imported: its architecture is 'mamba'",
    ),
    "list of architectures": (
        header(0, 1, string("general.architecture") + struct.pack("<IIQ", 9, 8, 1) + string("llama")),
        "its architecture is ",
    ),
    "no weights": (header(0, 1, ARCH), "^hostile.gguf can't be imported: it has no token embedding"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_a_sentence(case: str, tmp_path: Path):
    data, reason = HOSTILE[case]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=reason):
        import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.gguf"]


def test_a_truncated_file_is_refused_wherever_it_ends(good: bytes, tmp_path: Path):
    file = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), len(good) // 2, len(good) - 4096]:
        file.write_bytes(good[:length])
        with pytest.raises(ModelError):
            import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


def test_an_import_is_done_once_and_anew_for_another_file(good: bytes, tmp_path: Path):
    file = tmp_path / "good.gguf"
    file.write_bytes(good)
    folder = import_gguf(file, tmp_path / "out")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert import_gguf(file, tmp_path / "out") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    file.write_bytes(good + bytes(32))
    import_gguf(file, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns != made


def test_sampling_is_the_files_own_before_the_callers(tmp_path: Path):
    source = build_family("llama", tmp_path / "source")
    own = {"general__sampling__temp": 0.5, "general__sampling__min_p": 0.25}
    _, file = write_gguf(source, tmp_path / "m.gguf", "llama", Type.F16, **own)
    folder = import_gguf(file, tmp_path / "out", sampling={"temperature": 0.2, "top_p": 0.75})
    config = json.loads((folder / "generation_config.json").read_text())
    assert {**config, "eos_token_id": 0} == {
        "eos_token_id": 0,
        "temperature": 0.5,
        "top_p": 0.75,
        "min_p": 0.25,
    }


@pytest.mark.slow
def test_the_program_shows_a_bar_and_nothing_of_its_libraries(good: bytes, tmp_path: Path):
    """There is no PyTorch, which transformers would warn of, and no bar before there is progress."""
    file = tmp_path / "good.gguf"

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "omlxd.models.gguf.importing", str(file), str(tmp_path / "out")]
        ours, theirs = os.pipe()
        try:
            return subprocess.run(command, stdin=ours, capture_output=True, text=True, timeout=120)
        finally:
            os.close(ours)
            os.close(theirs)

    file.write_bytes(b"")
    failed = run()
    assert (failed.returncode, failed.stderr) == (1, "")
    file.write_bytes(good)
    made = run()
    assert made.returncode == 0 and "importing good.gguf" in made.stderr and "?" not in made.stderr
    assert len(made.stderr.splitlines()) == 1
    assert run().stderr == ""  # It is here already.


@pytest.mark.slow
def test_what_a_killed_import_left_goes_at_the_next_one_and_at_the_next_start(good: bytes, tmp_path: Path):
    file = tmp_path / "good.gguf"
    file.write_bytes(good)
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from omlxd.models.gguf.importing import import_gguf;"
        "import_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    models = tmp_path / "models"

    def left_by_a_killed_one() -> list[Path]:
        command = [sys.executable, "-c", program, str(file), str(models / "killed")]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        return [path for path in models.iterdir() if path.name.startswith(".killed")]

    assert len(left_by_a_killed_one()) == 1
    with part_folder(models / "other") as filled:
        assert import_gguf(file, models / "good") == models / "good"
        assert sorted(models.iterdir()) == [filled, models / "good"]
    assert len(left_by_a_killed_one()) == 1
    remove_leftovers(models)
    assert [*models.iterdir()] == [models / "good"]


def test_of_two_imports_at_once_the_first_ones_folder_stays(good: bytes, tmp_path: Path):
    """It may be served already."""
    (file := tmp_path / "good.gguf").write_bytes(good)
    first: list[int] = []

    def meanwhile(done: int, total: int) -> None:
        if not first:
            first.append(0)
            first[0] = import_gguf(file, tmp_path / "out").stat().st_ino

    assert import_gguf(file, tmp_path / "out", meanwhile).stat().st_ino == first[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.gguf", "out"]


def test_a_folder_of_somebody_else_is_left_alone(good: bytes, tmp_path: Path):
    file = tmp_path / "good.gguf"
    file.write_bytes(good)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="was not made by an import"):
        import_gguf(file, tmp_path / "out")


def test_no_room_on_the_disk(good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "good.gguf"
    file.write_bytes(good)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelError, match="MiB are free"):
        import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["good.gguf"]


def test_split_files_are_read_as_one(good: bytes, tmp_path: Path):
    """A part names how many there are; one that is missing is named."""
    key = string("split.count") + struct.pack("<IH", 2, 2)
    keys = struct.unpack_from("<Q", good, 16)[0]
    padding = string("p" * 26) + struct.pack("<IB", 0, 0)  # The data stay aligned to 32 bytes.
    first = good[:16] + struct.pack("<Q", keys + 2) + key + padding + good[24:]
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(first)
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf is missing"):
        read_header(tmp_path / "m-00001-of-00002.gguf")
    second = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + key + tensor("extra.weight", (8,), 0, 0)
    second += bytes(-len(second) % 32) + bytes(32)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(second)
    both = read_header(tmp_path / "m-00001-of-00002.gguf")
    assert both.tensors["extra.weight"].file.name == "m-00002-of-00002.gguf"
    assert both.tensors["token_embd.weight"].file.name == "m-00001-of-00002.gguf"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.F16], ids=lambda kind: kind.name)
def test_a_gguf_file_is_served_by_its_name(kind: Type, tmp_path: Path):
    source = build_family("llama", tmp_path / "source", changes=WIDE)
    name = f"tiny.{kind.name}"
    write_gguf(source, tmp_path / f"{name}.gguf", "llama", kind)
    with Daemon(tmp_path / "home", model=tmp_path / f"{name}.gguf") as daemon:
        assert daemon.model == name
        first = daemon.chat("Hello there, you tiny model of few words", max_tokens=8)
        again = daemon.chat("Hello there, you tiny model of few words", max_tokens=8)
        assert first["usage"]["completion_tokens"] == 8
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
    models = tmp_path / "home" / "omlxd" / "models"
    assert [path.name for path in models.iterdir()] == [name]
