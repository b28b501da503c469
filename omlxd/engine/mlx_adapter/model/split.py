"""One model over several processes: each takes its share, by mlx-lm's own splits, through MLX's distributed.

| split            | a rank has                                       | of a model that has              |
|------------------|--------------------------------------------------|----------------------------------|
| `tp:world/rank`  | some heads of each layer, all of what is small   | `Model.shard`                    |
| `pp:first-last`  | some layers; rank 0 the last ones                | `PipelineMixin`, and no `shard`  |

A share's KV equals the whole model's only up to rounding, so its split belongs in the namespace. Whatever
computes must do so on all ranks, in one order: a pass that one of them leaves out has the others wait.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pkgutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm.models
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.pipeline import PipelineMixin
from mlx_lm.utils import _get_classes

from ....errors import ModelError
from ..attention.backend import current
from ..runtime.arrays import give_memory_back

Group = mx.distributed.Group

MEET_S = {"ring": 30.0, "jaccl": 30.0, "nccl": 120.0}
"""Seconds for ranks that have begun to meet. MLX waits for ever, and lets no thread of this process run."""
TIMES = 5
"""How often the link is timed at once."""
LARGE = 1 << 20
"""Bytes of the sum by which its bandwidth is measured."""
MOST_NAMED = 8
"""Ranks, up to which a refusal says how many could share the model."""


def check_link(link: str) -> None:
    """Raise ModelError if nothing here carries sums by `link`."""
    if link == "nccl" and not current().own_memory:
        raise ModelError("--link nccl is for GPUs of CUDA; leave --link at ring", param="--link")
    if link == "jaccl" and not mx.distributed.is_available("jaccl"):
        raise ModelError(
            "--link jaccl: this MLX has no RDMA over Thunderbolt, as macOS alone has; leave --link at ring",
            param="--link",
        )


def join_group(rank: int, hosts: Sequence[str], link: str = "ring") -> Group:
    """The group of all ranks, whose addresses `hosts` are, `IP:PORT` each; returns once all are there.

    By NCCL between devices with memory of their own, else by `link`. Raises RuntimeError.
    """
    os.environ["MLX_RANK"] = str(rank)
    if current().own_memory:
        ip, _, port = hosts[0].rpartition(":")
        os.environ |= {"NCCL_HOST_IP": ip, "NCCL_PORT": port, "MLX_WORLD_SIZE": str(len(hosts))}
        return _meet("nccl")
    with tempfile.NamedTemporaryFile("w", prefix="omlxd-ranks-", suffix=".json") as file:
        if link == "jaccl":
            os.environ |= {"MLX_JACCL_COORDINATOR": hosts[0], "MLX_METAL_FAST_SYNCH": "1"}
            if "MLX_IBV_DEVICES" in os.environ:  # Of more than two machines, a cable each, their owner knows.
                return _meet("jaccl")
            json.dump(_devices(rank, hosts), file)
        else:
            json.dump([[host] for host in hosts], file)
        file.flush()
        os.environ["MLX_IBV_DEVICES" if link == "jaccl" else "MLX_HOSTFILE"] = file.name
        return _meet(link)


def _devices(rank: int, hosts: Sequence[str]) -> list[list[str | None]]:
    """By which RDMA device each rank reaches each other one; a rank knows its own, and reads no other's."""
    ip, every = hosts[rank].rpartition(":")[0], range(len(hosts))
    names = [name for name, has in psutil.net_if_addrs().items() if ip in {each.address for each in has}]
    if not names:
        raise ModelError(f"no interface of this machine has the address {ip}", param="--link")
    return [[None if one == other else f"rdma_{names[0]}" for other in every] for one in every]


def _meet(backend: str) -> Group:
    """End this process where the others don't come: by a thread of C, as no other runs."""
    faulthandler.dump_traceback_later(MEET_S[backend], exit=True)
    try:
        return mx.distributed.init(strict=True, backend=backend)
    finally:
        faulthandler.cancel_dump_traceback_later()


def rank_environment(rank: int) -> dict[str, str]:
    """Variables of another rank's process on this machine: of GPUs with memory of their own it sees one."""
    environ = dict(os.environ)
    if current().own_memory:
        seen = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environ["CUDA_VISIBLE_DEVICES"] = seen[rank] if rank < len(seen) else str(rank)
    return environ


def check_split(config: dict[str, Any], world: int) -> None:
    """Raise ModelError if `world` ranks can't share the model of this config. Reads no weights."""
    try:
        model = _get_classes(config)[0]
    except ValueError as error:
        raise ModelError(f"mlx-lm does not have this model: {error}") from error
    if not hasattr(model, "shard"):
        if not _has_pipeline(sys.modules[model.__module__]):
            raise ModelError(
                f"{config.get('model_type')} can't be shared by {world} ranks: mlx-lm splits the heads of "
                f"{_models_with('def shard(')}, and the layers of {_models_with('PipelineMixin,')}; serve it "
                "with --ranks 1",
                param="--ranks",
            )
        return
    text = {**config, **(config.get("text_config") or {})}
    found = {name: text.get(name) for name in ("num_attention_heads", "num_key_value_heads")}
    heads = {name: number for name, number in found.items() if isinstance(number, int)}
    for name, number in heads.items():
        if number % world:
            raise ModelError(
                f"{world} ranks can't share this model: its {name} is {number}, which {world} does not "
                f"divide; {_fitting([*heads.values()])}",
                param="--ranks",
            )


def _fitting(heads: list[int]) -> str:
    fit = [str(ranks) for ranks in range(2, MOST_NAMED + 1) if not any(each % ranks for each in heads)]
    *others, last = fit or ["no other number"]
    return f"{', '.join(others)}{' or ' * bool(others)}{last} of up to {MOST_NAMED} ranks can"


def _has_pipeline(module: Any) -> bool:
    kinds = [each for each in vars(module).values() if isinstance(each, type) and each is not PipelineMixin]
    return any(issubclass(kind, PipelineMixin) for kind in kinds)


def _models_with(words: str) -> str:
    """Names of mlx-lm's models whose source has `words`: importing all of them would take seconds."""
    folder = Path(mlx_lm.models.__path__[0])
    names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
    return ", ".join(name for name in names if words in (folder / f"{name}.py").read_text("utf-8"))


def take_share(model: Any, group: Group) -> None:
    """Leave in `model`, whose weights are not read yet, this rank's share. Raises ModelError."""
    try:
        if hasattr(model, "shard"):
            model.shard(group)
            split = f"tp:{group.size()}/{group.rank()}"
        else:
            model.model.pipeline(group)
            split = f"pp:{model.model.start_idx}-{model.model.end_idx - 1}"
        object.__setattr__(model, "omlxd_split", split)
        object.__setattr__(model, "omlxd_group", group)
    except Exception as error:
        raise ModelError(f"{group.size()} ranks can't share this model: {error}", param="--ranks") from error


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What ranks tell each other in a step of one token, timed by itself: nothing is computed meanwhile.

    exchanges    sums and other calls, one after another as in a step
    step_s       seconds of all of them
    bytes_per_s  that a sum of `LARGE` bytes gives
    """

    exchanges: int = 0
    step_s: float = 0.0
    bytes_per_s: float = 0.0


def time_link(model: Any, cache: Any) -> LinkTimes:
    """Time the link. All ranks must do so at once, each with an empty `cache`."""
    calls = _exchanges(model, cache)
    group = vars(model)["omlxd_group"]

    def step() -> mx.array:
        last = mx.zeros((1,))
        for exchange, shape, dtype, args, options in calls:
            ready = mx.depends(mx.zeros(shape, dtype), last)
            last = mx.depends(exchange(ready, *args, **options), ready)  # What is received needs nothing.
        return last

    def seconds(make: Callable[[], mx.array]) -> float:
        """The least of some times: what else the machine does is not the link's. The first one warms up."""
        took = list[float]()
        for _ in range(TIMES):
            made, began = make(), time.perf_counter()
            mx.eval(made)
            took.append(time.perf_counter() - began)
        return min(took)

    large = seconds(lambda: mx.distributed.all_sum(mx.zeros((LARGE // 4,)), group=group))
    return LinkTimes(len(calls), seconds(step), LARGE / large)


def _exchanges(model: Any, cache: Any) -> list[tuple[Any, tuple[int, ...], mx.Dtype, Any, Any]]:
    """What a step asks of MLX's distributed: calls, shapes, dtypes and the rest, in order."""
    calls: list[tuple[Any, tuple[int, ...], mx.Dtype, Any, Any]] = []
    real = {name: getattr(mx.distributed, name) for name in ("all_sum", "all_gather", "send", "recv_like")}

    def noted(exchange: Any) -> Any:
        def call(x: mx.array, *args: Any, **options: Any) -> mx.array:
            calls.append((exchange, x.shape, x.dtype, args, options))
            return exchange(x, *args, **options)

        return call

    try:
        for name, exchange in real.items():
            setattr(mx.distributed, name, noted(exchange))
        mx.eval(model(mx.array([[0]]), cache=cache))
    finally:
        for name, exchange in real.items():
            setattr(mx.distributed, name, exchange)
    return calls


def all_agree(so: bool, group: Group) -> bool:
    """Whether it is so on all ranks, each of which asks at this moment."""
    return mx.distributed.all_sum(mx.array([int(so)]), group=group).item() == group.size()


def read_share(model: Any, at_once: int = 1 << 30) -> None:
    """Read the weights of `model`'s share, some `at_once` bytes at a time: whole weights lie in memory until
    they are cut. A share of 9.0 GiB of an 8B shape takes 9.5 GiB so, and 10.8 all at once (an H200)."""
    part, nbytes = list[mx.array](), 0
    for _, value in tree_flatten(model.parameters()):
        array = cast(mx.array, value)
        part.append(array)
        nbytes += array.nbytes
        if nbytes >= at_once:
            mx.eval(part)
            give_memory_back()
            part, nbytes = [], 0
    mx.eval(part)


def split_of(model: Any) -> str:
    """Which share `model` holds; "": all of it."""
    return str(vars(model).get("omlxd_split", ""))
