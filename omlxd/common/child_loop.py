"""The program of a child process (child_process.py): `python child_loop.py SCRIPT MEMORY_BYTES CPU_S`.

SCRIPT is a file of Python that defines `answer`; it is called with the arguments of each frame. A script
imports nothing of omlxd: this process has none of it.

Frame: four bytes of length, little-endian, then MessagePack. In: a list of arguments. Out: what `answer`
returns.
"""

from __future__ import annotations

import contextlib
import resource
import runpy
import sys

import msgspec


def main(script: str, memory_bytes: str, cpu_s: str) -> None:
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (int(memory_bytes), resource.getrlimit(limit)[1]))
    answer = runpy.run_path(script)["answer"]
    frames, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(head := frames.read(4)) == 4:
        used = resource.getrusage(resource.RUSAGE_SELF)
        with contextlib.suppress(OSError, ValueError):
            # The end of a child whose parent is gone.
            most = int(used.ru_utime + used.ru_stime) + int(cpu_s)
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        frame = frames.read(int.from_bytes(head, "little"))
        reply = msgspec.msgpack.encode(answer(*msgspec.msgpack.decode(frame)))
        del frame
        answers.write(len(reply).to_bytes(4, "little"))
        answers.write(reply)
        answers.flush()
        del reply


if __name__ == "__main__":
    main(*sys.argv[1:])
