"""Bodies on their way to a thread that reads them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import IO

import pytest

from omlxd.cli.daemon.owner_api import Imported
from omlxd.errors import InvalidRequest, OmlxdError, RequestTooLarge
from omlxd.front.owner.cache import carry


async def test_a_pipe_is_open_until_the_thread_that_writes_it_is_done(monkeypatch: pytest.MonkeyPatch):
    """Else its bytes go to whatever file has the number next."""
    began, go = threading.Event(), threading.Event()
    still_open: list[bool] = []

    def slow(fs: object, fd: int, buffers: list[memoryview]) -> int:
        whose = os.fstat(fd).st_ino
        began.set()
        assert go.wait(60)
        still_open.append(os.fstat(fd).st_ino == whose)
        return len(buffers[0])

    monkeypatch.setattr(carry, "write_all", slow)

    async def body() -> AsyncIterator[bytes]:
        yield b"a piece"

    def work(source: IO[bytes]) -> bytes:
        return source.read()

    carrying = asyncio.create_task(carry._piped(body(), work))
    assert await asyncio.to_thread(began.wait, 60)
    carrying.cancel()
    await asyncio.sleep(0.2)
    carrying.cancel()  # By whoever is impatient.
    await asyncio.sleep(0.2)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await carrying
    assert still_open == [True]


@pytest.mark.parametrize(
    ("done", "error", "words"),
    [
        (Imported(), InvalidRequest, "it has no block and no record."),
        (Imported(bad=["'x': no block"]), InvalidRequest, "Nothing of it is imported: 'x': no block."),
        (Imported(bad=[f"'{n}': no block" for n in range(9)]), InvalidRequest, "'2': no block; and 6 more."),
        (Imported(full=1), RequestTooLarge, "no room for any of its 1 file."),
        (Imported(full=2, bad=["'x': no block"]), RequestTooLarge, "no room for any of its 2 files."),
        *((Imported(taken=taken, there=1 - taken, full=1, bad=["x"]), None, "") for taken in (0, 1)),
    ],
)
def test_an_archive_that_brings_nothing_is_an_error(
    done: Imported, error: type[OmlxdError] | None, words: str
):
    if error is None:
        carry._check_taken(done)
        return
    with pytest.raises(error) as caught:
        carry._check_taken(done)
    assert type(caught.value) is error and caught.value.message.endswith(words)
