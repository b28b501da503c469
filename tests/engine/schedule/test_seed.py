"""Random numbers of requests that name no seed: as the setting says, or another way at each load."""

from __future__ import annotations

import pytest
from daemon import family_model
from host import Host, chat, text_of


def said(seed: int | None) -> list[str]:
    """Three unlike answers to one question, after one load."""
    host = Host(family_model("qwen3"), seed=seed)
    try:
        return [text_of(host.ask(chat(temperature=1.0, max_tokens=12))) for _ in range(3)]
    finally:
        host.close()


@pytest.mark.slow
def test_a_seed_makes_each_load_alike_and_none_makes_it_another():
    first = said(5)
    assert len(set(first)) == 3 and said(5) == first
    others = [said(6), said(None), said(None)]
    assert all(first != other for other in others) and others[1] != others[2]
