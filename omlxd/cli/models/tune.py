"""`omlxd tune`: trains a LoRA adapter of a model, which the daemon then serves as `MODEL:NAME`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...common.units import available_ram, human
from ...config import Settings, add_flags, closest, settings_of
from ...errors import ConfigError, OmlxdError
from ...models.adapters import ADAPTER_FILES
from ...models.catalog import Catalog, InstalledModel, looks_like_model, own_adapters
from ...models.footprint import footprint
from ...models.tuning import Example, Job, lora_of, memory_need, read_data
from ..daemon.client import DaemonError, NoDaemon, daemon_of
from ..daemon.owner_api import DaemonStatus, TidyMemory
from .command import as_listed

_NUMBERS = {
    "iters": (200, 1, 10**6, "steps of training"),
    "batch-size": (4, 1, 1024, "examples in a step"),
    "rank": (None, 1, 1024, "of the adapter's matrices"),
    "layers": (None, 0, 1000, "that are adapted, the last ones; 0: all"),
    "max-length": (2048, 2, 10**6, "tokens of an example; what is beyond is cut"),
    "seed": (0, 0, 2**31, "of the order of examples and of the first numbers"),
}
_RANK, _LAYERS, _SCALE = 8, 0, 20.0
"""Rank, layers and scale of a new adapter. One that is resumed keeps its own."""
_DECAY = 0.01


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the training; returns its exit status. Raises ConfigError and DaemonError."""
    _add_flags(parser)
    args = parser.parse_args(argv)
    settings = settings_of(args, "base_path", "model_dir", model=args.model)
    if args.model_dir is None:
        name, folder = as_listed(args.model, settings)
        settings = msgspec.structs.replace(settings, model=name, model_dir=folder)
    model = _installed(settings, settings.model)
    assert model.folder is not None
    train, valid = read_data(args.data)
    name = args.data.absolute().name if args.name is None else args.name
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"--name: {name!r} is no name of letters, digits, - and _.")
    target = own_adapters(model.id, settings.base_path) / name
    if args.resume and not target.is_dir():
        raise ConfigError(f"{model.id}:{name} is not there to be resumed.")
    with _claimed(target, settings.base_path) as lock:
        there = (target / ADAPTER_FILES[1]).exists()
        if there != args.resume:
            problem = "is there; --resume goes on with it" if there else "is not there to be resumed"
            raise ConfigError(f"{model.id}:{name} {problem}.")
        job = _job(args, model.folder, target, train, valid)
        fit_memory(job, model.folder, settings, args.grad_checkpoint)
        status = _train(job, lock)
    if not status:
        print(f"{model.id}:{name} is in {target}; `omlxd models list` has it, loss.svg its losses")
    return status


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an installed model: a name of `omlxd models list` or a folder")
    parser.add_argument(
        "--data", required=True, type=Path, metavar="FOLDER", help="with train.jsonl, valid.jsonl"
    )
    parser.add_argument("--name", help="of the adapter; default: the data folder's")
    for name, (default, least, most, text) in _NUMBERS.items():
        kind = _integer(least, most)
        usual = {"rank": _RANK, "layers": _LAYERS}.get(name, default)
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{text} (default: {usual})"
        )
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument(
        "--scale", type=_positive, metavar="X", help=f"of the adapter's part of a sum (default: {_SCALE:g})"
    )
    scale.add_argument("--alpha", type=_positive, metavar="X", help="instead: scale = alpha / rank, as PEFT")
    parser.add_argument(
        "--keys",
        type=_names_of,
        metavar="NAME,…",
        help="which matrices of a layer are adapted, as q_proj,v_proj (default: all)",
    )
    parser.add_argument("--learning-rate", type=_rate, default=1e-4, metavar="X", help="(default: 1e-4)")
    parser.add_argument(
        "--weight-decay", type=_decay, default=_DECAY, metavar="X", help=f"AdamW's (default: {_DECAY})"
    )
    parser.add_argument(
        "--grad-checkpoint",
        action=argparse.BooleanOptionalAction,
        help="compute layers again instead of keeping their work: slower, less memory (default: where memory "
        "is short)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the adapter (default: float32)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the adapter of that name")
    add_flags(parser, "base_path", "model_dir")


def _train(job: Job, lock: int) -> int:
    """Run the trainer; returns its exit status. SIGINT and SIGTERM go to it alone; it saves at the first."""
    program = [sys.executable, "-m", "omlxd.engine.server.tune"]
    trainers: list[subprocess.Popen[bytes]] = []
    forward = lambda number, _: [trainer.send_signal(number) for trainer in trainers]  # noqa: E731
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    pipe = subprocess.PIPE
    try:
        trainers.append(
            subprocess.Popen(program, stdin=pipe, umask=0o077, pass_fds=(lock,), start_new_session=True)
        )
        stdin = trainers[0].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(msgspec.json.encode(job) + b"\n")
            stdin.flush()
            trainers[0].wait()  # It would stop if its standard input ended.
        return trainers[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _claimed(target: Path, base_path: Path) -> Iterator[int]:
    """Make and lock folder `target`, in which one trainer runs at a time. The lock is the trainer's, too."""
    for folder in (*reversed(target.relative_to(base_path).parents[:-1]), target.relative_to(base_path)):
        (base_path / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DaemonError(f"{target} is being trained already; wait, or give another --name.") from None
        try:
            yield lock
        finally:
            with contextlib.suppress(OSError):
                target.rmdir()  # It is empty where nothing was saved.
    finally:
        os.close(lock)


def _job(
    args: argparse.Namespace, folder: Path, target: Path, train: list[Example], valid: list[Example]
) -> Job:
    """Return the job of the flags. Raises ConfigError where flags do not go with the model, or with the
    adapter that is resumed.
    """
    layers, lora = _LAYERS, {"rank": _RANK, "scale": _SCALE, "dropout": 0.0}
    most = footprint(folder).layers
    rank = args.rank or _RANK
    if args.resume:
        layers, lora = lora_of(target)
        rank = args.rank or lora["rank"]
    scale = args.scale if args.alpha is None else args.alpha / rank
    if args.resume:
        given = {
            "rank": (args.rank, lora["rank"]),
            "layers": (args.layers if args.layers is None else args.layers or most, layers or most),
            "keys": (args.keys, lora.get("keys")),
            "scale" if args.alpha is None else "alpha": (scale, lora.get("scale")),
        }
        for flag, (asked, has) in given.items():
            if asked is not None and not _same(asked, has):
                problem = (
                    f"the adapter has {_spoken(has)}, and keeps it; leave out --{flag}, or give a new --name"
                )
                raise ConfigError(f"--{flag}: {problem}.")
    else:
        layers = layers if args.layers is None else args.layers
        lora |= {"rank": rank, "scale": _SCALE if scale is None else scale}
        if args.keys is not None:
            lora["keys"] = args.keys
    if layers > most:
        raise ConfigError(f"--layers: {layers} are more than the model's {most}.")
    return Job(
        model=str(folder),
        data=str(args.data),
        adapter_path=str(target),
        train=train,
        valid=valid,
        iters=args.iters,
        batch_size=min(args.batch_size, len(train), len(valid) or len(train)),
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        num_layers=layers,
        lora_parameters=lora,
        max_seq_length=args.max_length,
        seed=args.seed,
        resume=args.resume,
        dtype=args.dtype,
    )


def _installed(settings: Settings, name: str) -> InstalledModel:
    base, _, adapter = name.rpartition(":")
    for tuned in Catalog(msgspec.structs.replace(settings, model=base)).models().values() if base else ():
        if tuned.adapter is not None and tuned.adapter.name == adapter and base in _names(tuned, tuned.base):
            raise ConfigError(
                f"{name} is an adapter, and only a base is tuned; "
                f"`omlxd tune {base} --name {adapter} --resume --data FOLDER` goes on with it."
            )
    named = [
        model
        for model in Catalog(settings).models().values()
        if model.adapter is None and name in _names(model, model.id)
        if model.folder is not None and looks_like_model(model.folder)
    ]
    if not named:
        ids = [model.id for model in Catalog(settings).models().values() if model.adapter is None]
        near = closest(name, [spelt for id in ids for spelt in (id.rpartition("/")[2], id)])
        raise ConfigError(
            f"There is no model {name!r} on this machine{near}; `omlxd models pull` downloads one."
        )
    return named[0]


def _names(model: InstalledModel, id: str) -> tuple[str, ...]:
    return id, id.rpartition("/")[2], model.spec


def fit_memory(job: Job, folder: Path, settings: Settings, checkpoint: bool | None = None) -> None:
    """Choose whether `job` keeps each layer's work, and its limit. Raises DaemonError if there is no room.

    checkpoint  what --grad-checkpoint says; None: by the memory that is free

    A daemon of these settings is asked what its engines hold, and to give back what it can.
    """
    prints = footprint(folder, float32=True)
    free = _free(settings, trim=False)
    job.grad_checkpoint = memory_need(prints, job) > free // 2 if checkpoint is None else checkpoint
    need = memory_need(prints, job)
    if need > free:
        free = _free(settings, trim=True)
    if need > free:
        raise DaemonError(
            f"Training needs about {human(need)} and {human(max(0, free))} are free beside the daemon's "
            f"models; a smaller --batch-size or --max-length needs less{_less(job)}; `omlxd models unload` "
            "frees a model."
        )
    job.memory_limit = free


def _less(job: Job) -> str:
    return "" if job.grad_checkpoint else ", as --grad-checkpoint does"


def _free(settings: Settings, trim: bool) -> int:
    """Return the bytes that this machine and --memory-limit leave beside the daemon."""
    held = 0
    try:
        status = daemon_of(settings).fetch("/omlxd/memory", DaemonStatus, TidyMemory(trim=trim))
        held = sum(model.resident for model in status.models)
    except NoDaemon:
        pass
    except OmlxdError as error:
        print(f"omlxd: the daemon's memory is not known: {error.message}", file=sys.stderr)
    free = available_ram()
    return min(free, settings.memory_limit_bytes - held) if settings.memory_limit_bytes else free


def _integer(least: int, most: int):
    def whole_number(text: str) -> int:
        if not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most}")
        return int(text)

    return whole_number


def _rate(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return float(text)


def _decay(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return float(text)


def _positive(text: str) -> float:
    if not 0 < float(text) <= 10**4:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 10000")
    return float(text)


def _names_of(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names with commas between them")
    return sorted(set(names))


def _same(asked: object, has: object) -> bool:
    """Return whether an adapter has what flags ask for. Its keys may be longer names of the same."""
    if isinstance(asked, list) and isinstance(has, list):
        fits = [[key == name or key.endswith(f".{name}") for name in asked] for key in has]
        return all(map(any, fits)) and all(map(any, zip(*fits, strict=True)))
    if isinstance(asked, float) and isinstance(has, (int, float)):
        return math.isclose(asked, has)
    return asked == has


def _spoken(has: object) -> str:
    return "all" if has is None else ",".join(map(str, has)) if isinstance(has, list) else str(has)
