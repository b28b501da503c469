"""Labels behind a prompt with images are as likely as the answer's own tokens say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

if not all(map(importlib.util.find_spec, ("mlx_vlm", "PIL"))):
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from fast_or_slow import diagonal
from vision_families import VISION_FAMILIES
from vision_rig import Segments, VisionRig, image

FAST = ("qwen3_vl", "gemma4")
TALKS: tuple[Segments, ...] = ([(150, 1), image(1), (70, 2)], [(10, 3), image(2), (5, 4)])
"""The last pass of one has text alone, and that of the other an image."""


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("family", "talk"),
    [
        *((name, talk) for name in FAST for talk in TALKS),
        *diagonal([name for name in VISION_FAMILIES if name not in FAST], TALKS, ("qwen3_5",)),
    ],
    indirect=["family"],
    scope="module",
)
def test_labels_are_as_likely_as_what_is_generated(family: str, model: Path, talk: Segments):
    with VisionRig(family, model) as rig:
        generated = rig.begin(talk, 3, top_logprobs=5)
        one, two, three = generated.tokens()
        rig.settle()
        scored = rig.begin(talk, labels=[[one], [one, two, three], [one, two]], top_logprobs=5)
        scored.tokens()
        rig.settle()
        assert scored.scores is not None
        wanted = [likelihood.logprob for likelihood in generated.likelihoods[:3]]
        for found, count in zip(scored.scores.logprobs, (1, 3, 2), strict=True):
            np.testing.assert_allclose(found, wanted[:count], rtol=0, atol=2e-3)
        token, likeliest = scored.scores.likeliest
        assert token == one and next(id for id, _ in likeliest.top) == one
