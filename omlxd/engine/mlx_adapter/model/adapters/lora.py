"""Several LoRA adapters of one model in one process: they share its weights, and rows of a pass may differ.

    row_adapters([a, None, b]) → layer(x) = W x + scale[i] · B[i] A[i] x, where i is the row's

| the rows of a pass have   | a layer computes                                                         |
|---------------------------|--------------------------------------------------------------------------|
| no adapter                | what it does without this module                                         |
| one, all the same         | what mlx-lm's own module of that adapter does: the same bits             |
| several, or some of them  | its own product for all rows at once, and two gathered products of A and B |

In the last case A and B are stacked over all adapters, place 0 being zeros, for rows without one; smaller
ranks are padded with zeros. Adapters of other kinds (DoRA, experts) have no such product: rows of one share
no pass with others.

On the engine thread, between passes.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_adapters

from .....errors import AdapterError, ModelError
from .....models.adapters import ADAPTER_FILES, check_adapter
from ...attention.backend import current
from ...runtime.device import backend
from ...runtime.gpu_faults import end_if_fault

log = logging.getLogger(__name__)

_LEAVES = ("lora_a", "lora_b", "m")
NEAR = 0.02
"""How far logits of a row may be from those that it has alone, as a share of the largest: rounding."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One that is loaded. Compared by identity.

    nbytes  of its own matrices
    mixes   its rows may share a pass with others
    place   in the stacks
    """

    folder: str
    scale: float = 0.0
    nbytes: int = 0
    mixes: bool = False
    place: int = 0


class _Slot:
    """What adapters add to one layer. `modules`: mlx-lm's, by adapter; `a`, `b`: the stacks."""

    def __init__(self) -> None:
        self.modules: dict[Adapter, Any] = {}
        self.a = self.b = mx.zeros(0)

    def holds(self, adapter: Adapter, module: Any) -> bool:
        """Whether the matrices of `module` are views of the stacks."""
        of_rank = adapter.mixes and module.lora_a.shape[1] == self.a.shape[2]
        return of_rank and module.lora_a.dtype == module.lora_b.dtype == self.a.dtype


class _Rows:
    """The adapters of a pass's rows."""

    def __init__(self, adapters: Sequence[Adapter | None]):
        self.count = len(adapters)
        self.present = {adapter for adapter in adapters if adapter is not None}
        self.only = adapters[0] if len(set(adapters)) == 1 else None
        if self.only is None:
            self.places = mx.array([adapter.place if adapter else 0 for adapter in adapters], mx.uint32)
            self.scales = mx.array([adapter.scale if adapter else 0.0 for adapter in adapters])[:, None, None]


class _Pass(threading.local):
    rows: _Rows | None = None


_pass = _Pass()


@contextmanager
def row_adapters(adapters: Sequence[Adapter | None]) -> Iterator[None]:
    """Passes on this thread compute each row with its adapter; None: with none."""
    before, _pass.rows = _pass.rows, _Rows(adapters) if any(adapters) else None
    try:
        yield
    finally:
        _pass.rows = before


def may_share_pass(adapters: Sequence[Adapter | None]) -> bool:
    """Whether rows with these adapters may be computed in one pass."""
    return len(set(adapters)) == 1 or all(adapter is None or adapter.mixes for adapter in adapters)


@functools.cache
def _adapted(kind: Any) -> Any:
    """`kind`, a layer's class, with what the adapters in its `slot` add."""

    def __call__(layer: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows, slot = _pass.rows, layer.lora_slot
        if rows is None or rows.present.isdisjoint(slot.modules):
            return kind.__call__(layer, x, *args, **kwargs)
        if rows.only is not None:
            with row_adapters(()):  # The module calls this layer for the base's part.
                return slot.modules[rows.only](x, *args, **kwargs)
        if x.ndim != 3 or x.shape[0] != rows.count:
            raise ModelError(f"a layer gets {x.shape} for {rows.count} rows")
        z = mx.gather_mm(mx.gather_mm(x, slot.a, rhs_indices=rows.places), slot.b, rhs_indices=rows.places)
        return kind.__call__(layer, x) + (rows.scales * z).astype(x.dtype)

    return type(kind.__name__, (kind,), {"__call__": __call__, "plain_class": kind})


@dataclass(slots=True)
class Adapters:
    """Those of `model`, whose layers stay the same objects. `float32`: their matrices are made so."""

    model: Any
    float32: bool = False
    loaded: list[Adapter] = field(default_factory=list)

    def add(self, folder: str) -> Adapter:
        """Load the adapter in `folder`. Raises AdapterError, and all is as before."""
        layers = dict(self.model.named_modules())
        high, low = cast(list[int], cast(list[mx.array], mx.random.state)[0].tolist())
        try:
            read_adapter(self.model, folder)
        finally:
            mx.random.seed(high << 32 | low)  # As it was: mlx-lm draws matrices before it reads them.
            now = dict(self.model.named_modules())
            modules = {name: now[name] for name in layers if now.get(name) is not layers[name]}
            self.model.update_modules(tree_unflatten([(name, layers[name]) for name in modules]))
        self.loaded.append(adapter := Adapter(folder))
        try:
            self._put_in(adapter, layers, modules)
        except BaseException:
            adapter.mixes = False
            self.remove(adapter)
            raise
        return adapter

    def _put_in(self, adapter: Adapter, layers: dict[str, Any], modules: dict[str, Any]) -> None:
        """Put `modules` beside the `layers` of the same names. An error leaves some of them in place."""
        for name, module in modules.items():
            module.eval()  # No dropout.
            module.update(tree_unflatten([(n, self._own(a)) for n, a in _matrices(module)]))
            mx.eval([a for _, a in _matrices(module)])
            adapter.nbytes += sum(a.nbytes for _, a in _matrices(module))
            layer = layers[name]
            if not hasattr(layer, "lora_slot"):
                layer.lora_slot, layer.__class__ = _Slot(), _adapted(type(layer))
            layer.lora_slot.modules[adapter] = module
        if not modules:
            raise AdapterError(f"{adapter.folder} is no adapter of this model: it changes no layer")
        scales = {getattr(module, "scale", None) for module in modules.values()}
        from mlx_lm.tuner.lora import LoRALinear  # With an adapter it is there; without one nobody needs it.

        if len(scales) == 1 and all(type(module) is LoRALinear for module in modules.values()):
            adapter.scale = float(scales.pop() or 0)
            sides = [side for m in modules.values() for side in (m.lora_a.shape[0], m.lora_b.shape[1])]
            adapter.mixes = not any(side % current().gathered_multiple for side in sides)
        self._stack()
        adapter.mixes = adapter.mixes and self._agrees(adapter)

    def remove(self, adapter: Adapter) -> None:
        """No row may have it any more."""
        self.loaded.remove(adapter)
        for layer in self._layers():
            layer.lora_slot.modules.pop(adapter, None)
            if not layer.lora_slot.modules:
                layer.__class__ = layer.plain_class
                del layer.lora_slot
        self._stack()

    @property
    def nbytes(self) -> int:
        """Of all matrices, stacks included."""
        slots = [layer.lora_slot for layer in self._layers()]
        stacks = sum(slot.a.nbytes + slot.b.nbytes for slot in slots if slot.a.size)
        apart = (m for slot in slots for a, m in slot.modules.items() if not slot.holds(a, m))
        return stacks + sum(array.nbytes for module in apart for _, array in _matrices(module))

    def _own(self, array: mx.array) -> mx.array:
        return array.astype(mx.float32) if self.float32 else array

    def _layers(self) -> list[Any]:
        return [module for _, module in self.model.named_modules() if hasattr(module, "lora_slot")]

    def _stack(self) -> None:
        """Stack the matrices of each layer over all adapters that mix; those of full rank become views."""
        mixing = [adapter for adapter in self.loaded if adapter.mixes]
        for place, adapter in enumerate(mixing, 1):
            adapter.place = place
        for layer in self._layers():
            slot = layer.lora_slot
            pairs = {a: (m.lora_a, m.lora_b) for a, m in slot.modules.items() if a.mixes}
            if not pairs:
                slot.a = slot.b = mx.zeros(0)
                continue
            rank, multiple = max(a.shape[1] for a, _ in pairs.values()), current().gathered_multiple
            rank = -(-rank // multiple) * multiple
            (some_a, some_b), *_ = pairs.values()
            # Gathered products of a CPU are float32 alone.
            dtype = mx.float32 if backend() == "cpu" else mx.result_type(*(a for a, _ in pairs.values()))
            blank = mx.zeros((some_a.shape[0], rank), dtype), mx.zeros((rank, some_b.shape[1]), dtype)
            padded = [blank]
            for adapter in mixing:
                a, b = pairs.get(adapter, blank)
                short = rank - a.shape[1]
                padded.append((mx.pad(a, [(0, 0), (0, short)]), mx.pad(b, [(0, short), (0, 0)])))
            slot.a = mx.stack([a.astype(dtype) for a, _ in padded])
            slot.b = mx.stack([b.astype(dtype) for _, b in padded])
            mx.eval(slot.a, slot.b)
            for adapter, (a, b) in pairs.items():
                module = slot.modules[adapter]
                if slot.holds(adapter, module):  # By a slice: a number as index would copy.
                    place = slice(adapter.place, adapter.place + 1)
                    a, b = slot.a[place].squeeze(0), slot.b[place].squeeze(0)
                else:  # They may be views of earlier stacks, which hold those as a whole.
                    a, b = mx.contiguous(a), mx.contiguous(b)
                module.lora_a, module.lora_b = a, b
                mx.eval(a, b)

    def _agrees(self, adapter: Adapter) -> bool:
        """Whether a pass of two rows, one with `adapter`, gives what each row has alone."""
        two = mx.array([[0], [0]])
        try:
            with row_adapters([adapter, None]):
                both = self.model(two)[:, -1].astype(mx.float32)
            with row_adapters([adapter]):
                first = self.model(two[:1])[:, -1].astype(mx.float32)
            alone = mx.concatenate([first, self.model(two[:1])[:, -1].astype(mx.float32)])
            near = mx.abs(both - alone).max(axis=1) <= NEAR * mx.abs(alone).max(axis=1)
            if bool(near.all().item()):
                return True
            problem = "its rows differ beside others"
        except Exception as error:
            end_if_fault(error)
            problem = f"{type(error).__name__}: {error}"
        log.warning("%s shares no pass with others: %s", adapter.folder, problem)
        return False


def _matrices(module: Any) -> list[tuple[str, mx.array]]:
    """What the adapter itself brings, not the layer inside."""
    return [(name, array) for name, array in tree_flatten(module.parameters()) if "." not in name]  # type: ignore[misc]


def read_adapter(model: Any, folder: str) -> None:
    """Put mlx-lm's modules of the adapter in `folder` into `model`. Raises AdapterError, some in place."""
    check_adapter(Path(folder))
    try:
        load_adapters(model, folder)
        held = cast(dict[str, mx.array], mx.load(f"{folder}/{ADAPTER_FILES[1]}"))
    except OSError as error:
        raise AdapterError(f"the adapter {folder} can't be read: {error.strerror or error}") from error
    except Exception as error:  # mlx-lm raises what its config or the file's tensors make of it.
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise AdapterError(f"{folder} is no adapter of this model: {first}") from error
    matrices = ((name, array) for name, array in held.items() if name.rpartition(".")[2] in _LEAVES)
    if unsound := next((name for name, array in matrices if not mx.isfinite(array).all().item()), ""):
        raise AdapterError(f"the adapter {folder} can't be used: {unsound} holds numbers that are not finite")
    # mlx-lm leaves zeros, or random numbers, where the file has nothing.
    wanted = [name for name, _ in tree_flatten(model.parameters()) if name.rpartition(".")[2] in _LEAVES]
    if missing := [name for name in wanted if name not in held]:
        count = f"{len(missing)} of {len(wanted)} tensors that its adapter_config.json asks for are missing"
        raise AdapterError(f"{folder} is no whole adapter of this model: {count}, as {missing[0]}")
