"""Sizes: what is read, to the byte, and what is refused, by the flag's name."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.common.units import (
    LEAST_CACHE,
    MOST_CACHE,
    counted,
    default_cap,
    disk_room,
    disk_total,
    human,
    parse_size,
    total_ram,
)
from omlxd.config import load_settings
from omlxd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("0GB", 0),
        ("8GB", 8_000_000_000),
        ("8 GB", 8_000_000_000),
        ("8gib", 8 * 2**30),
        ("512MB", 512_000_000),
        ("1.5GiB", 3 * 2**29),
        ("123456789", 123456789),
        ("9007199254740993", 9007199254740993),
        ("20%", 200),
        ("12.5%", 125),
        ("0%", 0),
        ("100%", 1000),
    ],
)
def test_sizes_are_read_to_the_byte(text: str, nbytes: int):
    assert parse_size(text, lambda: 1000) == nbytes


def test_what_is_too_little_is_told_by_what_was_forgotten():
    with pytest.raises(ValueError, match="that is 8 bytes; write the unit, as in 8GB"):
        parse_size("8")
    with pytest.raises(ValueError, match=r"that is 0\.2 bytes; write 20%, or the unit, as in 0\.2GB"):
        parse_size("0.2", lambda: 1000)
    with pytest.raises(ValueError, match="no size: that is too little; 1 MB is the least"):
        parse_size("8kB")
    assert parse_size("8kB", least=1000) == 8000  # Of a log file, for one.
    assert load_settings({"log_file_size": "20kB"}, {}).log_file_size == 20_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-1",
        "-8GB",
        "8G B",
        "8XB",
        "nan",
        "inf",
        "1e9",
        "101%",
        "-5%",
        "%",
        "8",
        "8kB",
        "auto",
        "9999999TB",
    ],
)
def test_nonsense_is_refused_by_the_flags_name(text: str):
    with pytest.raises(ValueError, match=r"^no size: "):
        parse_size(text, lambda: 1000)
    with pytest.raises(ConfigError) as caught:
        load_settings({"ssd_cache_daily_write_budget": text}, {})
    assert caught.value.message.startswith(f"--ssd-cache-daily-write-budget: {text!r} is no size: ")


def test_a_percentage_of_nothing_is_refused():
    with pytest.raises(ValueError, match="percentage"):
        parse_size("20%")


def test_ram_and_disk_are_real(tmp_path: Path):
    assert total_ram() > 10**8
    assert disk_total(tmp_path) == disk_total(tmp_path / "not" / "yet" / "made") > 10**6


def test_a_disk_s_last_bytes_are_no_room(tmp_path: Path, monkeypatch):
    for total, free, room in (
        (10**12, 7 * 10**9, 2 * 10**9),
        (10**12, 10**9, -4 * 10**9),
        (10**9, 10**8, 5 * 10**7),
    ):
        stat = SimpleNamespace(f_frsize=1000, f_blocks=total // 1000, f_bavail=free // 1000)
        monkeypatch.setattr(os, "statvfs", lambda place, stat=stat: stat)
        assert disk_room(tmp_path) == room
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_frsize=0, f_blocks=0, f_bavail=0))
    assert disk_room(tmp_path) == sys.maxsize


def test_human():
    assert [human(n) for n in (0, 999, 1500, 8 * 10**9, 10**12)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "8 GB",
        "1 TB",
    ]


def test_counted():
    assert [counted(n, "file") for n in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]


@given(room=st.integers(-(10**10), 4 * 10**11), held=st.integers(0, 10**11), more=st.integers(0, 10**9))
def test_a_cap_that_nobody_set_follows_the_disk_and_not_the_cache(room: int, held: int, more: int):
    cap = default_cap(room, held)
    assert LEAST_CACHE <= cap <= MOST_CACHE
    assert cap == default_cap(room + held, 0), "what the cache holds changes nothing"
    assert cap <= max(LEAST_CACHE, room + held), "the disk's last bytes are others'"
    assert 0 <= default_cap(room + more, held) - cap <= more, "a little more room is no leap"
