"""Memory of a Mac, by stand-ins for the functions of its C library; no Mac was used."""

from __future__ import annotations

import ctypes
import os
import struct
from types import SimpleNamespace

import psutil
import pytest

from omlxd.common import darwin
from omlxd.common.units import available_ram, memory_pressure, process_memory, total_ram

GB = 10**9
POINTER = ctypes.c_void_p
SYSCTL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, POINTER, POINTER, POINTER, ctypes.c_size_t)
RUSAGE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, POINTER)


@pytest.fixture
def sysctls(monkeypatch) -> dict[str, bytes]:
    """Bytes that the kernel writes, by name. A process's footprint is 123 GB, but an ended one's is 0."""
    values: dict[str, bytes] = {}

    def sysctlbyname(name: bytes, value: int, size: int, new: int | None, new_length: int) -> int:
        room = ctypes.c_size_t.from_address(size)
        if (data := values.get(name.decode())) is None or room.value < len(data) or new or new_length:
            return -1
        ctypes.memmove(value, data, len(data))
        room.value = len(data)
        return 0

    def proc_pid_rusage(pid: int, flavor: int, buffer: int) -> int:
        if pid > 2:
            return -1
        times = (1, 2, 3, 4, 5, 6 * GB, 7 * GB, 123 * GB if pid == 1 else 0, 9, 10)
        data = bytes(range(16)) + struct.pack("<10Q", *times)
        ctypes.memmove(buffer, data, len(data))
        return 0 if flavor == 0 else -1

    library = SimpleNamespace(sysctlbyname=SYSCTL(sysctlbyname), proc_pid_rusage=RUSAGE(proc_pid_rusage))
    monkeypatch.setattr(darwin, "_library", lambda: library)
    return values


def test_macos_is_asked_in_its_own_words(sysctls):
    sysctls |= {"int": struct.pack("<i", -7), "long": struct.pack("<q", 1 << 40), "text": b"arm64 and more"}
    names = ("int", "long", "text", "no.such.name")
    assert [darwin.sysctl_int(name) for name in names] == [-7, 1 << 40, None, None]
    assert [darwin.phys_footprint(pid) for pid in (1, 2, 3)] == [123 * GB, None, None]


@pytest.mark.parametrize(
    ("level", "pressure", "pageable", "share"),
    [
        (90, 1, 0, 0.9),  # files and other programs' memory give way
        (90, 1, 0.3, 0.6),  # but not what is one's own
        (10, 1, 0, 0.2),
        (90, 2, 0, 0.2),
        (90, 4, 0, 0.2),
    ],
)
def test_ram_that_macos_can_free_is_free(sysctls, monkeypatch, level, pressure, pageable, share):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(0.2 * total_ram())))
    for name, value in (("level", level), ("vm_pressure_level", pressure)):
        sysctls[f"kern.memorystatus_{name}"] = struct.pack("<i", value)
    assert memory_pressure() == pressure
    assert available_ram(int(pageable * total_ram())) == pytest.approx(share * total_ram(), rel=1e-6)


def test_a_process_takes_what_macos_charges_to_it(monkeypatch):
    own = psutil.Process()
    assert process_memory(own) > 10**6
    monkeypatch.setattr(darwin, "phys_footprint", {os.getpid(): 5 * GB}.get)
    assert process_memory(own) == 5 * GB
