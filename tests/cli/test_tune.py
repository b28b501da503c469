"""`omlxd tune`: data that makes no sense, what there is room for, an adapter that is learned."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from daemon import alive, wait_until

from omlxd.cli.daemon.client import Daemon, DaemonError, NoDaemon
from omlxd.cli.daemon.owner_api import InstalledStatus
from omlxd.cli.models import tune
from omlxd.config import load_settings
from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.adapters import tuning
from omlxd.engine.server.tune import LossCurve, draw
from omlxd.errors import ConfigError, ModelError
from omlxd.models import demo
from omlxd.models.catalog import Catalog
from omlxd.models.footprint import footprint
from omlxd.models.tuning import Job, memory_need, read_data

ROW = {"prompt": "Two pears for Ida.", "completion": "ORDER[PEARS|2|Ida]"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def data(folder: Path, *rows: object, valid: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "train.jsonl").write_text(text)
    if valid is not None:
        (folder / "valid.jsonl").write_text(json.dumps(valid))
    return folder


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "train.jsonl: it holds no example"),
        ([""], "train.jsonl: it holds no example"),
        ([ROW, "", "{"], "line 3: "),
        ([ROW, "[]"], "line 2: Expected `object`"),
        ([{"prompt": "a"}], "line 1: it has none of"),
        ([{"prompt": "a", "completion": ""}], "line 1: its completion is empty"),
        ([{"text": ""}], "line 1: its text is empty"),
        ([{"messages": []}], "line 1: it has none of"),
        ([{"messages": CHAT["messages"][:1]}], "line 1: it has none of"),
        ([{"messages": [{"content": "x"}]}], "line 1: Object missing required field `role`"),
        ([{"text": 5}], "line 1: Expected `str"),
        ([ROW, CHAT], "one kind are needed, and here are messages and prompt"),
        (['{"text": "\ud800"}'.encode("utf-8", "surrogatepass").decode("latin-1")], "train"),
    ],
)
def test_data_that_makes_no_sense_is_refused_with_its_line(tmp_path: Path, rows, words):
    if words == "train":
        (tmp_path / "train.jsonl").write_bytes(b'{"text": "\xff"}')
    else:
        data(tmp_path, *rows)
    with pytest.raises(ConfigError) as caught:
        read_data(tmp_path)
    assert words in caught.value.message and str(tmp_path) in caught.value.message


def test_a_folder_without_data_and_one_in_ten_for_validation(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train\.jsonl: No such file"):
        read_data(tmp_path)
    train, valid = read_data(data(tmp_path, *[ROW] * 20))
    assert (len(train), len(valid)) == (18, 2)
    train, valid = read_data(data(tmp_path, *[ROW] * 3))
    assert (len(train), len(valid)) == (3, 0)
    train, valid = read_data(data(tmp_path, *[CHAT] * 20, valid=CHAT))
    assert (len(train), len(valid)) == (20, 1)


def test_a_speed_of_nothing_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    progress = tuning._Progress(tmp_path, None, 0, lambda: False)
    progress.report_train(1, 4.4, 0.3, 5)
    progress.report_train(2, 4.2, 80.4, 5)
    assert capsys.readouterr().out == "step 1: loss 4.400\nstep 2: loss 4.200, 80 tokens/s\n"


def test_a_named_pipe_is_no_data(tmp_path: Path):
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(ConfigError, match=r"train\.jsonl: it is not a regular file"):
        read_data(tmp_path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_demo(tmp_path_factory.mktemp("models") / "tiny")


def run(home: Path, base: Path, folder: Path, *words: str) -> int:
    argv = [str(base), "--data", str(folder), "--base-path", str(home), *words]
    return tune.main(argv, argparse.ArgumentParser())


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch: pytest.MonkeyPatch):
    def fetch(*args):
        raise NoDaemon("nothing answers")

    monkeypatch.setattr(Daemon, "fetch", fetch)
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "../up"], "is no name"),
        (["--name", " "], "is no name of"),
        (["--name", ""], "is no name of"),
        (["--layers", "999"], "--layers: 999 are more than the model's"),
        (["--resume"], "is not there to be resumed"),
    ],
)
def test_names_and_what_is_not_there(tmp_path: Path, base: Path, words, said):
    folder = data(tmp_path / "orders", ROW)
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, base, folder, *words)
    assert not list(tmp_path.glob("adapters/tiny/*")), "no empty folder stays"
    with pytest.raises(ConfigError, match="no model 'nobody' on this machine"):
        run(tmp_path, Path("nobody"), folder)


def test_a_model_that_the_daemon_lists_is_found(tmp_path: Path, base: Path, monkeypatch):
    shown = InstalledStatus(id="tiny", state="ready", source="model-dir", folder=str(base))
    monkeypatch.setattr(Daemon, "fetch", lambda *_: shown)
    with pytest.raises(ConfigError, match="--layers: 999 are more than the model's"):
        run(tmp_path, Path("tiny"), data(tmp_path / "orders", ROW), "--layers", "999")


@pytest.mark.parametrize(
    "words",
    [
        ["--iters", "0"],
        ["--rank", "x"],
        ["--max-length", "1"],
        ["--learning-rate", "2"],
        ["--scale", "0"],
        ["--scale", "nan"],
        ["--alpha", "16", "--scale", "2"],
        ["--keys", "q_proj,,v_proj"],
        ["--weight-decay", "-1"],
    ],
)
def test_numbers_out_of_range_end_with_2(tmp_path: Path, base: Path, words, capsys):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, base, data(tmp_path / "orders", ROW), *words)
    assert ended.value.code == 2 and words[0] in capsys.readouterr().err


def test_what_does_not_fit_beside_the_daemon_is_refused_with_both_figures(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = load_settings({"base_path": str(tmp_path)}, {})
    paths = {"model": "m", "data": "d", "adapter_path": "a", "train": [], "valid": []}
    numbers = {"iters": 1, "learning_rate": 1e-4, "num_layers": 0, "lora_parameters": {"rank": 8}, "seed": 0}
    job = Job(**paths, **numbers, batch_size=4, max_seq_length=2048)
    plain = memory_need(footprint(base, float32=True), job)
    job.grad_checkpoint = True
    least = memory_need(footprint(base, float32=True), job)
    assert least < plain
    job.grad_checkpoint = False
    monkeypatch.setattr(tune, "available_ram", lambda: 3 * plain)
    tune.fit_memory(job, base, settings)
    assert (job.grad_checkpoint, job.memory_limit) == (False, 3 * plain)
    monkeypatch.setattr(tune, "available_ram", lambda: least)
    tune.fit_memory(job, base, settings)
    assert job.grad_checkpoint and job.memory_limit == least
    with pytest.raises(DaemonError, match="needs less, as --grad-checkpoint does"):
        tune.fit_memory(job, base, settings, checkpoint=False)
    monkeypatch.setattr(tune, "available_ram", lambda: 3 * plain)
    tune.fit_memory(job, base, settings, checkpoint=True)
    assert job.grad_checkpoint
    monkeypatch.setattr(tune, "available_ram", lambda: least - 1)
    with pytest.raises(DaemonError, match=r"Training needs about .* and .* are free"):
        tune.fit_memory(job, base, settings)


@pytest.mark.slow
def test_an_adapter_is_trained_resumed_and_offered(tmp_path: Path, base: Path, capfd):
    folder = data(tmp_path / "orders", *[ROW] * 8, valid=ROW)
    words = ("--max-length", "64", "--batch-size", "2", "--learning-rate", "1e-3")
    assert run(tmp_path, base, folder, "--iters", "3", "--rank", "2", *words) == 0
    said = capfd.readouterr()
    assert (
        "tiny:orders is in" in said.out and "step 3: loss" in said.out and "\x1b" not in said.out + said.err
    )
    target = tmp_path / "adapters" / "tiny" / "orders"
    settings = load_settings({"base_path": str(tmp_path), "model": str(base), "no_hf_cache": "true"}, {})
    assert [model.adapter for model in Catalog(settings).models().values()] == [None, target]
    curve = xml.fromstring((target / "loss.svg").read_text())
    assert len(curve.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    kept = [target, target.parent, target.parent.parent, *target.iterdir()]
    assert not [path for path in kept if path.stat().st_mode & 0o077]
    with pytest.raises(ConfigError, match="tiny:orders is there; --resume goes on with it"):
        run(tmp_path, base, folder, *words)
    for other in ("--rank", "--layers"):
        with pytest.raises(ConfigError, match=f"{other}: the adapter has .*, and keeps it"):
            run(tmp_path, base, folder, "--resume", other, "1", *words)
    before = mx.load(str(target / "adapters.safetensors"))
    mx.eval(before)
    assert run(tmp_path, base, folder, "--iters", "1", "--resume", *words) == 0
    assert "step 4: loss" in capfd.readouterr().out, "steps and losses go on"
    assert "iteration 4<" in (target / "loss.svg").read_text()
    after = mx.load(str(target / "adapters.safetensors"))
    assert before.keys() == after.keys()
    changes = [mx.abs(after[name] - before[name]).max().item() for name in before]
    assert 0 < max(changes) < 0.01, "one step from where it was"
    assert run(tmp_path, base, folder, "--iters", "1", "--resume", "--dtype", "bfloat16", *words) == 0
    with pytest.raises(ConfigError, match=f"is an adapter.*omlxd tune {base} --name orders --resume"):
        run(tmp_path, Path(f"{base}:orders"), folder)
    with pytest.raises(ConfigError, match=r"is an adapter.*omlxd tune tiny --name orders --resume"):
        run(tmp_path, Path("tiny:orders"), folder, "--model-dir", str(base.parent))
    half = mx.load(str(target / "adapters.safetensors"))
    assert {array.dtype for array in half.values()} == {mx.bfloat16} and half.keys() == after.keys()
    assert mlx_adapter.load(base, adapter=str(target)).layout is not None


@pytest.mark.slow
def test_scale_keys_layers_and_decay_are_the_adapter_s_and_checkpointing_changes_no_loss(
    tmp_path: Path, base: Path, capfd
):
    folder = data(tmp_path / "orders", *[ROW] * 4, valid=ROW)
    words = ("--max-length", "64", "--batch-size", "2", "--learning-rate", "1e-3", "--iters", "3")
    choice = ("--alpha", "16", "--keys", "q_proj,self_attn.v_proj", "--layers", "1")
    losses = []
    for name, flag in (("plain", "--no-grad-checkpoint"), ("again", "--grad-checkpoint")):
        assert run(tmp_path, base, folder, *words, *choice, "--name", name, flag) == 0
        losses.append(re.findall(r"step \d+: .*loss [\d.]+", capfd.readouterr().out))
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert furthest(weights(tmp_path, "plain"), weights(tmp_path, "again")) < 1e-6
    assert {name.split(".", 3)[3] for name in weights(tmp_path, "plain")} == {
        f"self_attn.{key}.lora_{side}" for key in ("q_proj", "v_proj") for side in "ab"
    }
    target = tmp_path / "adapters" / "tiny" / "plain"
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["num_layers"] == 1 and config["lora_parameters"]["scale"] == 2.0
    assert mlx_adapter.load(base, adapter=str(target)).layout is not None
    resumed = (*words, "--name", "plain", "--resume")
    for flag, value in (("--scale", "3"), ("--alpha", "8"), ("--keys", "q_proj"), ("--layers", "2")):
        with pytest.raises(ConfigError, match=f"{flag}: the adapter has .*, and keeps it"):
            run(tmp_path, base, folder, *resumed, flag, value)
    assert run(tmp_path, base, folder, *resumed, *choice, "--rank", "8") == 0
    assert run(tmp_path, base, folder, *words, *choice, "--name", "decayed", "--weight-decay", "1") == 0
    assert furthest(weights(tmp_path, "again"), weights(tmp_path, "decayed")) > 1e-5


def weights(home: Path, name: str) -> dict[str, mx.array]:
    found = mx.load(str(home / "adapters" / "tiny" / name / "adapters.safetensors"))
    mx.eval(found)
    assert isinstance(found, dict)
    return found


def furthest(one: dict[str, mx.array], other: dict[str, mx.array]) -> float:
    assert one.keys() == other.keys()
    return max(mx.abs(one[name] - other[name]).max().item() for name in one)


@pytest.mark.slow
def test_a_training_that_goes_on_is_as_one_without_a_stop(tmp_path: Path, base: Path, capfd):
    folder = data(tmp_path / "orders", *[ROW] * 2, valid=ROW)
    words = ("--max-length", "64", "--batch-size", "2", "--learning-rate", "1e-3")
    assert run(tmp_path, base, folder, *words, "--iters", "1", "--name", "first") == 0
    assert run(tmp_path, base, folder, *words, "--iters", "8", "--name", "whole") == 0
    way = furthest(weights(tmp_path, "first"), weights(tmp_path, "whole"))
    assert 1e-3 < way < 7 * 1.2e-3, "a step is about the rate, not several times the rate"
    assert run(tmp_path, base, folder, *words, "--iters", "5", "--name", "parts") == 0
    assert furthest(weights(tmp_path, "whole"), weights(tmp_path, "parts")) > 1e-3
    assert run(tmp_path, base, folder, *words, "--iters", "3", "--name", "parts", "--resume") == 0
    assert furthest(weights(tmp_path, "whole"), weights(tmp_path, "parts")) < 1e-5
    assert "no fitting" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["cut", "of another adapter"])
def test_a_training_that_goes_on_without_its_moments_begins_slowly(
    tmp_path: Path, base: Path, lost: str, capfd
):
    folder = data(tmp_path / "orders", *[ROW] * 2, valid=ROW)
    words = ("--max-length", "64", "--batch-size", "2", "--learning-rate", "1e-3")
    assert run(tmp_path, base, folder, *words, "--iters", "3") == 0
    target = tmp_path / "adapters" / "tiny" / "orders"
    moments, matrices = target / "optimizer.safetensors", target / "adapters.safetensors"
    if lost == "gone":
        moments.unlink()
    elif lost == "cut":
        moments.write_bytes(moments.read_bytes()[:-1000])
    else:
        mx.save_safetensors(str(matrices), {name: 2 * a for name, a in weights(tmp_path, "orders").items()})
    before = weights(tmp_path, "orders")
    capfd.readouterr()
    assert run(tmp_path, base, folder, *words, "--iters", "1", "--resume") == 0
    assert "no fitting optimizer.safetensors" in capfd.readouterr().out
    slow = weights(tmp_path, "orders")
    assert 0 < furthest(before, slow) < 1e-4, "a twentieth of the rate"
    assert run(tmp_path, base, folder, *words, "--iters", "1", "--resume") == 0
    assert "no fitting" not in capfd.readouterr().out
    assert 0 < furthest(slow, weights(tmp_path, "orders")) < 2e-4, "it goes on to rise"


@pytest.mark.slow
def test_a_save_that_fails_is_one_sentence_and_the_earlier_adapter_stays(tmp_path: Path, base: Path, capfd):
    folder = data(tmp_path / "orders", *[ROW] * 4)
    words = ("--max-length", "32", "--iters", "1")
    assert run(tmp_path, base, folder, *words, "--rank", "256") == 0
    target = tmp_path / "adapters" / "tiny" / "orders"
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    assert len(before["adapters.safetensors"]) > 2 << 20
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert run(tmp_path, base, folder, *words, "--resume") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capfd.readouterr().err
    assert re.search(r"what was saved before is kept: .*write.* are free in", said), said
    assert "Traceback" not in said
    after = {file.name: file.read_bytes() for file in target.iterdir()}
    assert after.keys() == before.keys() and after["adapters.safetensors"] == before["adapters.safetensors"]
    assert run(tmp_path, base, folder, *words, "--resume") == 0
    assert "step 2: loss" in capfd.readouterr().out, "the step that is lost is not counted"


@contextmanager
def in_training(home: Path, base: Path) -> Iterator[subprocess.Popen[str]]:
    """A training that has made its first steps."""
    folder = data(home / "orders", *[ROW] * 4)
    words = ["--data", folder, "--base-path", home, "--max-length", "64", "--iters", "4900"]
    command = [sys.executable, "-m", "omlxd", "tune", base, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as training:
        assert training.stdout is not None
        next(line for line in training.stdout if line.startswith("step "))
        yield training


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_training_that_is_stopped_saves_its_steps(
    tmp_path: Path, base: Path, number: signal.Signals, capfd
):
    with in_training(tmp_path, base) as training:
        training.send_signal(number)
        _, said = training.communicate(timeout=60)
    stopped = re.search(r"stopped after (\d+) steps, which are saved", said)
    assert training.returncode == 130 and stopped, said
    adapter = tmp_path / "adapters" / "tiny" / "orders"
    assert mlx_adapter.load(base, adapter=str(adapter)).layout is not None
    assert run(tmp_path, base, tmp_path / "orders", "--resume", "--iters", "1", "--max-length", "64") == 0
    assert f"step {int(stopped[1]) + 1}: loss" in capfd.readouterr().out, "also steps without a line count"


@pytest.mark.slow
def test_a_trainer_whose_parent_is_killed_saves_and_ends(tmp_path: Path, base: Path):
    with in_training(tmp_path, base) as training:
        (trainer,) = psutil.Process(training.pid).children()
        training.kill()
        training.communicate(timeout=60)  # Both have closed their ends of the pipes.
    wait_until(lambda: not alive(trainer))
    assert mlx_adapter.load(base, adapter=str(tmp_path / "adapters" / "tiny" / "orders")).layout is not None


def test_an_adapter_is_trained_by_one_at_a_time(tmp_path: Path, base: Path):
    folder = data(tmp_path / "orders", ROW)
    target = tmp_path / "adapters" / "tiny" / "orders"
    target.mkdir(parents=True)
    other = os.open(target, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(DaemonError, match="is being trained already"):
            run(tmp_path, base, folder, "--iters", "1", "--max-length", "32")
    finally:
        os.close(other)


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path):
    curve = LossCurve(tmp_path / "loss.svg")
    curve.on_val_loss_report({"iteration": 0, "val_loss": 2.0})
    curve.on_train_loss_report({"iteration": 5, "train_loss": 1.5})
    assert (tmp_path / "loss.svg").read_text() == draw({"training": [(5, 1.5)], "validation": [(0, 2.0)]})
    with pytest.raises(ModelError, match="the loss is no number"):
        curve.on_train_loss_report({"iteration": 6, "train_loss": float("nan")})
