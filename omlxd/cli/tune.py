"""`omlxd tune`: trains a LoRA adapter of a model, which the daemon then serves as `MODEL:NAME`."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..common.units import available_ram, human
from ..config import Settings, add_flags, settings_of
from ..errors import ConfigError, OmlxdError
from ..models.catalog import ADAPTER_FILES, Catalog, InstalledModel, looks_like_model, own_adapters
from ..models.footprint import footprint
from ..models.tuning import Job, memory_need, read_data
from .daemon_client import DaemonError, NoDaemon, address_of, fetch
from .owner_api import DaemonStatus, TidyMemory

_NUMBERS = {
    "iters": (200, 10**6, "steps of training"),
    "batch-size": (4, 1024, "examples in a step"),
    "rank": (8, 1024, "of the adapter's matrices"),
    "layers": (0, 1000, "that are adapted, the last ones; 0: all"),
    "max-length": (2048, 10**6, "tokens of an example; what is beyond is cut"),
    "seed": (0, 2**31, "of the order of examples and of the first numbers"),
}


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Exit status of the training. Raises ConfigError and DaemonError."""
    parser.add_argument("model", help="an installed model: a name of `omlxd models list` or a folder")
    parser.add_argument(
        "--data", required=True, type=Path, metavar="FOLDER", help="with train.jsonl, valid.jsonl"
    )
    parser.add_argument("--name", help="of the adapter; default: the data folder's")
    for name, (default, most, text) in _NUMBERS.items():
        kind = _whole_number(int(name not in ("layers", "seed")), most)
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument("--learning-rate", type=_rate, default=1e-4, metavar="X", help="(default: 1e-4)")
    parser.add_argument("--resume", action="store_true", help="go on with the adapter of that name")
    add_flags(parser, "base_path", "model_dir")
    args = parser.parse_args(argv)
    settings = settings_of(args, "base_path", "model_dir", model=args.model)
    model = _installed(settings, args.model)
    assert model.folder is not None
    train, valid = read_data(args.data)
    name = args.name or args.data.absolute().name
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"--name: {name!r} is no name of letters, digits, - and _.", param="--name")
    target = own_adapters(model.id, settings.base_path) / name
    there = (target / ADAPTER_FILES[1]).exists()
    if there != args.resume:
        problem = "is there; --resume goes on with it" if there else "is not there to be resumed"
        raise ConfigError(f"{model.id}:{name} {problem}.", param="--name")
    job = Job(
        model=str(model.folder),
        data=str(args.data),
        adapter_path=str(target),
        train=train,
        valid=valid,
        iters=args.iters,
        batch_size=min(args.batch_size, len(train), len(valid) or len(train)),
        learning_rate=args.learning_rate,
        num_layers=args.layers,
        rank=args.rank,
        max_seq_length=args.max_length,
        seed=args.seed,
        resume=args.resume,
    )
    fit_memory(job, model.folder, settings)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = [sys.executable, "-m", "omlxd.engine.tune"]
    status = subprocess.run(program, input=msgspec.json.encode(job), check=False).returncode
    if not status:
        print(f"{model.id}:{name} is in {target}; `omlxd models list` has it, loss.svg its losses")
    return status


def _installed(settings: Settings, name: str) -> InstalledModel:
    models = Catalog(settings).models().values()
    named = [model for model in models if name in (model.id, model.id.rpartition("/")[2], model.spec)]
    if not named or named[0].folder is None or not looks_like_model(named[0].folder):
        raise ConfigError(f"There is no model {name!r} on this machine; `omlxd models pull` downloads one.")
    if named[0].adapter is not None:
        raise ConfigError(f"{named[0].id} has an adapter; name its base, and --resume to go on.")
    return named[0]


def fit_memory(job: Job, folder: Path, settings: Settings) -> None:
    """Choose whether `job` keeps each layer's work, and its limit. Raises DaemonError if there is no room.

    A daemon of these settings is asked what its engines hold, and to give back what it can.
    """
    prints = footprint(folder, float32=True)
    free = _free(settings, trim=False)
    job.grad_checkpoint = memory_need(prints, job) > free // 2
    need = memory_need(prints, job)
    if need > free:
        free = _free(settings, trim=True)
    if need > free:
        raise DaemonError(
            f"Training needs about {human(need)} and {human(max(0, free))} are free beside the daemon's "
            "models; a smaller --batch-size or --max-length needs less; `omlxd models unload` frees a model."
        )
    job.memory_limit = free


def _free(settings: Settings, trim: bool) -> int:
    """Bytes that this machine and --memory-limit leave beside the daemon."""
    held = 0
    try:
        body = msgspec.json.encode(TidyMemory(trim=trim))
        status = fetch(*address_of(settings), "/omlxd/memory", DaemonStatus, body)
        held = sum(model.resident for model in status.models)
    except NoDaemon:
        pass
    except OmlxdError as error:
        print(f"omlxd: the daemon's memory is not known: {error.message}", file=sys.stderr)
    free = available_ram()
    return min(free, settings.memory_limit_bytes - held) if settings.memory_limit_bytes else free


def _whole_number(least: int, most: int):
    def whole_number(text: str) -> int:
        if not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most}")
        return int(text)

    return whole_number


def _rate(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return float(text)
