"""Stand-ins of caffeinate and systemd-inhibit that live and die as the real ones do."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = {
    # Ends with the process that it is told, or by a signal.
    "caffeinate": """
[ "$1 $2" = "-i -w" ] || { echo "usage: caffeinate [-disu] [-t timeout] [-w Process ID]" >&2; exit 64; }
while kill -0 "$3" 2>/dev/null; do sleep 0.1; done
""",
    # Runs the command after its options, with its own standard input, and ends with its status.
    "systemd-inhibit": """
while [ "${1#--}" != "$1" ]; do shift; done
"$@"
""",
}


class AwakePrograms:
    """The programs in `folder`, which goes on PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        self._pids = folder / "pids.txt"
        for name, body in PROGRAMS.items():
            self.write(name, f'echo $$ >> "{self._pids}"{body}')

    def write(self, name: str, body: str) -> None:
        program = self.folder / name
        program.write_text(f"#!/bin/sh\n{body}")
        program.chmod(0o755)

    def pids(self) -> list[int]:
        """Of all that were ever started."""
        return [int(line) for line in self._pids.read_text().split()] if self._pids.exists() else []
