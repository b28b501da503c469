"""Text by the language models of mlx-vlm, of families that mlx-lm does not have.

Pinned to mlx-vlm 0.7.10. What this file relies on, each tested in tests/engine/mlx_adapter/test_vlm_text.py:
- the package `mlx_vlm.models.<model_type>` has the family, `Model(…).language_model` its language model, and
  a call of that with `cache=` gives an object with `logits`, with `return_hidden=True` also `hidden_states`;
- its caches of the classes that `vision.own_cache` replaces keep what mlx-lm's do.

What else such a language model must be, `TextModel.check` looks at: some of mlx-vlm's look both ways, as an
encoder or a diffusion model, and some get more from the whole model than their tokens.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from .....errors import ModelError
from .....models.footprint import INSTALL_VISION, VLM_VERSION, has_vlm, read_config
from ...cache.kinds import Cache, leaves
from ...runtime.arrays import distance
from ..positions import give_streams, is_head, keeps_streams
from . import vision

FAR = 0.2
"""`distance` of logits from which on `TextModel.check` fails. In bfloat16 rounding may choose other experts;
a model that does not see the token before, or sees the one behind, is at 0.3 and more."""


class TextModel(nn.Module):
    """A language model of mlx-vlm that is called as mlx-lm's are: model(tokens, cache=…) gives logits."""

    def __init__(self, whole: Any):
        super().__init__()
        self.language_model = language = whole.language_model
        object.__setattr__(self, "whole", whole)  # No part of it: what sees or hears is never read.
        self._has_places = hasattr(language, "get_rope_index")

    @property
    def keeps_places(self) -> bool:
        """Whether it takes no positions, and keeps those of its last pass."""
        return hasattr(self.language_model, "get_rope_index") and not self._has_places

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def make_cache(self) -> Cache:
        return vision.own_cache(self.language_model)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Logits of `tokens` (rows, tokens). Nothing of a request stays in the model."""
        inputs: dict[str, Any] = {}
        if self._has_places and cache is not None:
            self.language_model._position_ids = self.language_model._rope_deltas = None
            inputs["position_ids"] = vision.positions(cache, tokens.shape)
        if not keeps_streams():
            return self.language_model(tokens, cache=cache, **inputs).logits
        out = self.language_model(tokens, cache=cache, return_hidden=True, **inputs)
        give_streams(out.hidden_states[-1])
        return out.logits

    def check(self) -> None:
        """Raise ModelError unless it gives what mlx-vlm's whole model does, token by token as at once.

        Once: the whole model goes.
        """
        whole: Any = self.whole
        object.__delattr__(self, "whole")
        failed: Exception | None = None
        for places in (True, False) if self._has_places else (False,):
            self._has_places = places
            try:
                self._compare(whole)
                return
            except (AttributeError, IndexError, ModelError, TypeError, ValueError) as error:
                failed = error  # Some take positions of another shape, and know those of text without.
        if isinstance(failed, ModelError):
            raise failed
        reason = shorten(str(failed), 300, placeholder=" …")
        raise ModelError(f"mlx-vlm's model does not compute a text by itself: {reason}") from failed

    def _compare(self, whole: Any) -> None:
        first, other = (self(mx.array([tokens]), cache=self.make_cache()) for tokens in ([1, 2], [1, 3]))
        if not distance(other[:, 0], first[:, 0]) < FAR:
            raise ModelError("its language model looks ahead: it does not continue a text token by token")
        cache = self.make_cache()
        self(mx.array([[1]]), cache=cache)
        if not distance(self(mx.array([[2]]), cache=cache)[:, -1], first[:, -1]) < FAR:
            raise ModelError("its language model does not go on from its cache")
        theirs = whole(mx.array([[1, 2]]), cache=vision.own_cache(self.language_model)).logits
        if not distance(theirs, first) < FAR:
            raise ModelError("its language model alone is not all that mlx-vlm computes of a text")


def check(model: Any) -> None:
    """`TextModel.check` of one that mlx-vlm gave; nothing of others."""
    if isinstance(model, TextModel):
        model.check()


def can_batch(model: Any, cache: Cache) -> bool:
    """Whether rows of such caches may be put together, where mlx-vlm says that it can.

    Not where a model keeps positions of its own: of rows it keeps the last pass's.
    Classes that its families share do it right in those of the tests. A family's own class may not: rows of
    unequal length of `qwen4_exp` attend to tokens that they did not choose (cache/chosen.py).
    """
    if isinstance(model, TextModel) and model.keeps_places:
        return False
    kept = [one for _, leaf in leaves(cache) for one in getattr(leaf, "caches", [leaf])]
    homes = {type(one).__module__ for one in kept}
    return all(home == "mlx_vlm.models.cache" for home in homes if home.startswith("mlx_vlm."))


def lacks(config: dict[str, Any]) -> bool:
    """Whether mlx-lm has no model of this config's type. One that names a Python file is left to mlx-lm."""
    if config.get("model_file") or not isinstance(config.get("model_type"), str):
        return False
    try:
        _get_classes(config)
    except (ValueError, AttributeError):
        return True
    return False


def load_text_model(folder: Path) -> tuple[TextModel, dict[str, Any]]:
    """The language model, its weights not read yet, and its config. Raises ModelError."""
    config = read_config(folder)
    family = str(config.get("model_type"))
    lm = f"mlx-lm {version('mlx-lm')}"
    if not has_vlm():
        raise ModelError(
            f"{folder}: {lm} has no model of type {family!r}. mlx-vlm {VLM_VERSION} may have one, and is not "
            f"installed: {INSTALL_VISION}"
        )
    utils = vision.import_vlm("utils")
    name = utils.get_model_type(config)
    found = find_spec(f"mlx_vlm.models.{name}") if name.isidentifier() else None
    if found is None or found.submodule_search_locations is None:  # A family is a package.
        raise ModelError(
            f"{folder}: neither {lm} nor mlx-vlm {VLM_VERSION} has a model of type {family!r}; "
            f"a newer omlxd may have it: update omlxd, or take another model"
        )
    vision.take_attention()
    _call_heads_once()
    try:
        return TextModel(utils.load_model(folder, lazy=True)), utils.load_config(folder)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = shorten(str(error), 300, placeholder=" …")
        raise ModelError(f"mlx-vlm can't load {folder} as {family!r}: {reason}") from error


def _call_heads_once() -> None:
    """Have mlx-vlm call a head once for a pass of few tokens, not once a token: our head chooses its
    positions itself (positions.py)."""
    module: Any = vision.import_vlm("models.linear")
    if (own := module.native_batch_linear).__module__ != module.__name__:
        return

    def native_batch_linear(head: Any, x: mx.array) -> mx.array:
        return head(x) if is_head(head) else own(head, x)

    module.native_batch_linear = native_batch_linear
