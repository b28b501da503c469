"""`omlxd doctor --join HOST`: the link to a host that joins, and what a model's sums would take over it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from ...common.ports import JOIN_PORT, peer_address
from ...common.units import PREFILL_CHUNK, human
from ...config import Settings
from ...errors import ConfigError
from ...kv.peer.client import UNTRUSTED, asking, mend
from ...kv.peer.frames import Channel, Echo
from ...kv.peer.identity import Identity, PeerError
from ...models.catalog import default_model
from ...models.footprint import footprint
from .finding import Finding, bad, ok

ROUNDS, LARGE = 50, 16 << 20
NUMBER_BYTES = 2
SUMS = 2
"""Of a layer that ranks split by heads."""
SEE_LOG = "See what `omlxd join` on that machine says"


def check_link(settings: Settings, host: str) -> list[Finding]:
    """Measure the paired channel to `host`. Raises ConfigError for what is no address."""
    try:
        address = peer_address(host, JOIN_PORT)
    except ValueError:
        raise ConfigError(f"--join: {host!r} is no address; write HOST or HOST:PORT.") from None
    try:
        with asking(Identity(settings.base_path), address) as channel:
            round_trip, rate = measure(channel)
    except PeerError as error:
        how = mend(error)
        if not how and UNTRUSTED in str(error):
            how = f"`omlxd peer code` there shows a code, by which `omlxd peer pair {host}` pairs both"
        return [bad("link", f"{host}: {error}", f"{how[:1].upper()}{how[1:] or SEE_LOG}.")]
    link = ok(
        "link",
        f"{host}: a round trip takes {1e3 * round_trip:.3g} ms, and {human(int(rate))} a second go through, "
        "as measured over the paired channel",
    )
    return [link, *_cost(settings, round_trip, rate)]


def measure(channel: Channel, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Return (seconds of a round trip, bytes a second in one direction). Raises OSError and PeerError."""

    def echo(nbytes: int) -> float:
        data = memoryview(bytearray(nbytes))
        began = clock()
        channel.send(Echo(nbytes))
        channel.send_bytes(data)
        channel.read(nbytes)
        return clock() - began

    round_trip = statistics.median(echo(1) for _ in range(ROUNDS))
    there_and_back = min(echo(LARGE) for _ in range(3))
    return round_trip, 2 * LARGE / max(there_and_back - round_trip, 1e-9)


def sums(layers: int, hidden_size: int, tokens: int, round_trip: float, rate: float) -> float:
    """Return the seconds that two machines' sums take in a pass over `tokens`: in MLX's ring each is a round
    trip, in which each machine sends all of it once.
    """
    return SUMS * layers * (round_trip + tokens * hidden_size * NUMBER_BYTES / rate)


def _cost(settings: Settings, round_trip: float, rate: float) -> list[Finding]:
    model = default_model(settings)
    if model is None or model.folder is None:
        return []
    prints = footprint(model.folder)
    if not prints.layers or not prints.hidden_size:
        return []
    step, chunk = (sums(prints.layers, prints.hidden_size, n, round_trip, rate) for n in (1, PREFILL_CHUNK))
    return [
        ok(
            "step",
            f"{model.id} has {prints.layers} layers of {prints.hidden_size} numbers, with {SUMS} sums each: "
            f"by these figures they take two machines {1e3 * step:.3g} ms of a token's step, and "
            f"{chunk:.3g} s of {PREFILL_CHUNK:,} tokens of a prompt",
        )
    ]
