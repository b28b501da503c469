"""The command line of `omlxd join`. Exit status 0: stopped in order; 1: it can't listen, or another omlxd
holds the SSD cache; 2: a flag makes no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ...common.ports import JOIN_PORT
from ...config import Settings, add_join_flags, load_settings
from ...config.settings import BY_SERVICE
from ...errors import ConfigError
from ...kv.ledger.ledger import LedgerBusy
from ...kv.peer.identity import Identity
from ...models.catalog import default_model
from ...models.resolve import check_folder
from ..engines.ledger.cold_ledger import ColdLedger
from ..engines.link import ENGINE_COMMAND
from ..process.logs import Logs
from ..process.notify import Notifier
from ..process.own_process import allow_many_files, leave, make_base, what_to_do
from ..process.peers import open_named
from ..process.sockets import CannotListen, inherited_sockets
from .host import JoinHost

log = logging.getLogger(__name__)


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Wait for leads until a signal ends it. Raises ConfigError."""
    settings, named = read(argv, parser)
    Logs(settings)
    make_base(settings)
    folder = _named_folder(settings) if named else None
    try:
        sockets = inherited_sockets() or [open_named(settings, "join_listen", JOIN_PORT)]
    except CannotListen as error:
        print(f"omlxd: {error}", file=sys.stderr)
        return 1
    allow_many_files()
    with asyncio.Runner() as runner:
        leave(runner.run(_run(settings, sockets[0], folder)))


def read(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[Settings, bool]:
    """Return the settings, and whether a model is named. Raises ConfigError, with the flags as typed."""
    parser.description = (
        "Have this machine compute a share of a model that another one serves by `omlxd serve --join`. It "
        "waits for one that is paired, and shows a code for the first pairing."
    )
    add_join_flags(parser)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    try:
        return load_settings({**given, "host": "127.0.0.1"}), "model" in given
    except ConfigError as error:
        raise ConfigError(error.message.replace("--join-listen", "--listen")) from None


def _named_folder(settings: Settings) -> Path:
    model = default_model(settings)
    if model is None or model.folder is None:
        raise ConfigError(f"--model: {settings.model} is not here; `omlxd models pull` fetches it.")
    check_folder(model.folder)
    return model.folder


async def _run(settings: Settings, listening, folder: Path | None) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    cold = ColdLedger.of(settings)
    busy = await cold.claim()
    if isinstance(busy, LedgerBusy) and settings.if_cache_busy == "stop":
        print(f"omlxd: {what_to_do(busy)}", file=sys.stderr)
        await cold.close()
        return 1
    plain = ("--mlx-blas",) if settings.cpu_blas == "off" else ()
    command = shlex.split(os.environ.get("OMLXD_ENGINE_COMMAND", "")) or ENGINE_COMMAND
    host = JoinHost(settings, listening, cold, folder, (*command, *plain))
    host.start()
    _say_where(settings, listening.getsockname()[:2])
    notify = Notifier()
    notify.ready("waits for a lead")
    notify.watch()
    await stop.wait()
    log.info("stopping")
    notify.stopping()
    host.close()
    await host.gone()
    await cold.close()
    return 0


def _say_where(settings: Settings, at: tuple[str, int]) -> None:
    """Print the address, and a code for the first pairing."""
    place = at[0] if at[1] == JOIN_PORT else f"{at[0]}:{at[1]}"
    print(f"omlxd: waiting for a lead at {at[0]}:{at[1]}", flush=True)
    identity = Identity(settings.base_path)
    if identity.paired():
        return
    # A service's output is a log, where no code belongs.
    code = "" if os.environ.get(BY_SERVICE) else identity.new_code()
    how = (
        f"the code {code}, for 5 minutes and 3 tries"
        if code
        else "the code that `omlxd peer code` shows here"
    )
    print(f"Pair it once: `omlxd peer pair {at[0]}:{at[1]}` on the lead, with {how}.")
    if code:
        print("After that `omlxd peer code` shows another.")
    print(f"Then: `omlxd serve --model MODEL --join {place}`.", flush=True)
