"""A GPU fault ends the engine, whoever meets it, and nothing that it spoiled is kept."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cold_run import prompt
from families import build_family
from rig import BLOCK, Output, Rig

import omlxd.engine
from omlxd.cli.cache.checks.check import check
from omlxd.engine.kvio import bridge, checkpointer, copier
from omlxd.engine.kvio.reads.restore import Restore
from omlxd.engine.mlx_adapter.attention.backend import MlxBackend
from omlxd.engine.mlx_adapter.cuda.backend import STICKY
from omlxd.engine.mlx_adapter.runtime import gpu_faults
from omlxd.engine.schedule import forward
from omlxd.engine.schedule.decode_batch import DecodeBatch
from omlxd.errors import ModelError

TIMEOUT = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)
KEPT, MORE = prompt(200), prompt(200) + prompt(150, seed=1)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What ended this "engine": the thread that meets a fault ends, as its process would."""
    ended: list[str] = []

    def end(what: str) -> None:
        ended.append(what)
        raise SystemExit

    monkeypatch.setattr(gpu_faults, "_end", None)
    monkeypatch.setattr(gpu_faults, "_marks", ())
    gpu_faults.watch(MlxBackend.gpu_faults, end)
    yield ended


def run(model: Path, root: Path, tokens: list[int]) -> Output:
    with Rig(model, root) as rig:
        rig.use_grid(BLOCK)
        return rig.run(tokens, 20)


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.safetensors")}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_next"])
def spared(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, and what no fault has spoiled: its cache of KEPT, and of MORE as well."""
    folder = tmp_path_factory.mktemp("spared")
    model = build_family(request.param, folder / request.param)
    run(model, folder / "kept", KEPT)
    shutil.copytree(folder / "kept", folder / "more")
    run(model, folder / "more", MORE)
    return model, folder / "kept", folder / "more"


PLACES: dict[str, tuple[str, Any, str, int]] = {
    "restore": ("qwen3", Restore, "_accept", 0),
    "hot blocks are appended": ("qwen3", bridge, "append_blocks", 0),
    "prefill": ("qwen3", forward, "compute_chunk", 1),
    "blocks are copied": ("qwen3", copier, "copy_blocks", 1),
    "states are copied": ("qwen3_next", checkpointer, "copy_state", 1),
    "MLX tells late": ("qwen3", MlxBackend, "check_work", 1),
    "decode": ("qwen3", DecodeBatch, "step", 5),
}
"""A family, where the fault is met, and how many calls go well before."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("spared", "place"),
    [(family, place) for place, (family, *_) in PLACES.items()],
    indirect=["spared"],
    scope="module",
)
def test_nothing_of_a_pass_that_failed_is_kept(
    place: str, spared: tuple[Path, Path, Path], ends: list[str], tmp_path: Path, monkeypatch: Any
):
    model, kept, more = spared
    _, owner, name, well = PLACES[place]
    root = shutil.copytree(kept, tmp_path / "cache")
    before, good = files(kept), files(more)
    with Rig(model, root) as rig:
        rig.use_grid(BLOCK)
        if place == "hot blocks are appended":
            rig.run(KEPT, 2)
        real, held = getattr(owner, name), list[int]()

        def fails(*args: Any, **named: Any) -> Any:
            nonlocal well
            well -= 1
            if well >= 0:
                return real(*args, **named)
            held.append(rig.pool.num_cached)
            raise RuntimeError(TIMEOUT)

        monkeypatch.setattr(owner, name, fails)
        output = rig.start(MORE, 20)
        rig._thread.join(60)
        assert ends == [TIMEOUT] and output.error is None and not output.reason
        assert [rig.pool.num_cached] == held, "something is in RAM that was not there before the fault"
    # Whatever was on its way to the disk has been written by now.
    assert before.items() <= files(root).items() <= good.items()
    assert not check(root).bad
    monkeypatch.undo()
    assert run(model, root, MORE).known >= len(KEPT) // BLOCK * BLOCK
    assert files(root) == good


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (RuntimeError(TIMEOUT), True),
        (RuntimeError("[METAL] Command buffer execution failed: Ignored (…SubmissionsIgnored)\nmore"), True),
        (chained(ModelError("it can't have --kv-bits 4"), RuntimeError(TIMEOUT)), True),
        (RuntimeError("cudaEventRecord failed: an illegal memory access was encountered"), True),
        (RuntimeError("[malloc] Unable to allocate"), False),
        (RuntimeError("cudaMallocAsync(…) failed: out of memory"), False),
        (ValueError(f"the client's template says {TIMEOUT}"), False),
    ],
)
def test_what_is_a_fault(error: Exception, ended: bool, ends: list[str]):
    gpu_faults.watch((*MlxBackend.gpu_faults, *STICKY), gpu_faults._end)  # type: ignore[arg-type]
    if not ended:
        gpu_faults.end_if_fault(error)
        assert not ends
        return
    with pytest.raises(SystemExit):
        gpu_faults.end_if_fault(error)
    assert len(ends) == 1 and "\n" not in ends[0]


ROOMS = ("kvio", "mlx_adapter", "schedule", "sequence", "server", "speculate", "vision")
NO_GPU = {
    "kvio/reads/tail_read.py: RuntimeError": "to submit a read computes nothing",
    "mlx_adapter/model/adapters/tuning.py: (OSError, RuntimeError, ValueError)": "another process: it trains",
    "mlx_adapter/model/checks.py: Exception": "a pass is put together, and none computed",
    "mlx_adapter/runtime/arrays.py: Exception": "the process ends",
    "server/ranks/lead.py: Exception": "to start a process computes nothing",
    "server/ranks/follower.py: Exception": "the process ends, and rank 0's with it",
    "vision/media_child.py: Exception": "another process, which decodes pictures",
}
"""And what `cuda/` hides each later call raises again; `measure/` serves nobody."""


def test_no_handler_hides_a_fault():
    """Each that goes on after any error logs it with its trace, or asks whether it is a fault."""
    engine, hidden = Path(omlxd.engine.__file__).parent, list[str]()
    for path in (path for room in ROOMS for path in (engine / room).rglob("*.py")):
        place = path.relative_to(engine).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and catches_all(node) and not shows(node):
                hidden.append(f"{place}: {ast.unparse(node.type) if node.type else ''}")
    assert {
        one for one in hidden if not one.startswith(("mlx_adapter/cuda", "server/measure"))
    } == NO_GPU.keys()


def catches_all(handler: ast.ExceptHandler) -> bool:
    names = {
        node.id for node in ast.walk(handler.type or ast.Name("Exception")) if isinstance(node, ast.Name)
    }
    return bool(names & {"Exception", "BaseException", "RuntimeError"})


def shows(handler: ast.ExceptHandler) -> bool:
    def called(node: ast.AST) -> str:
        return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""

    inside = [node for statement in handler.body for node in ast.walk(statement)]
    return any(
        isinstance(node, ast.Raise) or called(node) in ("exception", "end_if_fault", "set_exception", "_fail")
        for node in inside
    )
