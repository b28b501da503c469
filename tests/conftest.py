"""What holds for every test: nothing here depends on how fast or how busy the machine is.

Hypothesis looks at the same examples on each run, so that a change alone can break a test.
`OMLXD_TEST_RANDOM=1` looks at others each time.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

import exact_blas
import httpx
import pretend_metal
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

# Each worker, and each of hundreds of programs that tests start, would compile the same files anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# MLX on a CPU compiles each fused function by g++: two seconds for each of some 350 that these tests have.
# Engines that tests start inherit it.
if sys.platform == "linux":
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

PATIENCE_S = 120.0
"""Seconds that a test's client waits for an answer: on a busy machine the default of 5 is too few."""

SEARCH = os.environ.get("OMLXD_TEST_RANDOM", "") not in ("", "0")

hypothesis_settings.register_profile(
    "omlxd",
    deadline=None,
    derandomize=not SEARCH,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
hypothesis_settings.load_profile("omlxd")


exact_blas.put_first()


def be_patient() -> None:
    """Clients that name no timeout of their own get PATIENCE_S. httpx has no setting for it."""
    default = httpx._config.DEFAULT_TIMEOUT_CONFIG
    default.connect = default.read = default.write = default.pool = PATIENCE_S


be_patient()

# Each client makes one, of all authorities that this machine trusts: tens of milliseconds.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

for name in ("http_proxy", "https_proxy", "all_proxy"):  # All that is asked is on the loopback.
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)
for name in list(os.environ):  # A service manager's, if it runs these tests: no daemon of ours speaks to it.
    if name.startswith(("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_")):
        del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pretend-metal",
        action="store_true",
        help="have omlxd take the branches of Metal and macOS, on a CPU's arrays (support/pretend_metal.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("pretend_metal"):
        pretend_metal.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("pretend_metal"):
        for item in items:
            if (rule := item.get_closest_marker("cpu_rules")) is not None:
                item.add_marker(pytest.mark.skip(reason=rule.args[0]))


def pytest_collection_finish() -> None:
    """Tests and what they import are no garbage: a collection looks at what came since."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def ordinary_signals() -> Iterator[None]:
    """Programs that tests start get ^C and the end of a terminal as usual, under nohup and behind `&` too.

    What is ignored here they would ignore as well; what has a handler here has none in a new program.
    """
    ignored = [
        number
        for number in (signal.SIGHUP, signal.SIGINT)
        if signal.getsignal(number) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ]
    for number in ignored:
        signal.signal(number, lambda number, frame: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What omlxd says, and not what asyncio says when an earlier test's garbage is collected."""
    ours = logging.Filter("omlxd")
    caplog.handler.addFilter(ours)
    yield caplog
    caplog.handler.removeFilter(ours)


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """Engines in this process set the level that their front asks for."""
    own = logging.getLogger("omlxd")
    before = own.level
    yield
    own.setLevel(before)


@pytest.fixture(autouse=True)
def memory_is_limited_again() -> Iterator[None]:
    """An engine that ends in this process gives its memory back; the next test's may set limits."""
    yield
    if arrays := sys.modules.get("omlxd.engine.mlx_adapter.runtime.arrays"):
        arrays._released.clear()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """MLX's own random numbers begin with the time of day; tests that draw them get the same each time."""
    if mx := sys.modules.get("mlx.core"):
        mx.random.seed(0)
