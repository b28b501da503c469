"""Fetches the page's libraries anew: colours of code, and formulas, with their licences.

    python tools/web_libraries.py

`npm pack` downloads each at the version below; what the page does not need is left out. A module needs an
export, which temml's build lacks: a line is added to it. Changes none if the files are as pinned.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

WEB = Path(__file__).resolve().parents[1] / "omlxd" / "front" / "web"
LIBRARIES = (
    ("@highlightjs/cdn-assets@11.12.0", "es/highlight.min.js", "highlight.min.js", b""),
    ("temml@0.13.5", "dist/temml.min.js", "temml.min.js", b"\nexport default temml;\n"),
)


def main() -> None:
    licences = []
    with tempfile.TemporaryDirectory() as folder:
        for package, inside, name, more in LIBRARIES:
            done = subprocess.run(
                ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, check=True
            )
            with tarfile.open(Path(folder) / done.stdout.strip().splitlines()[-1]) as archive:
                (WEB / name).write_bytes(_read(archive, inside).rstrip() + (more or b"\n"))
                licences.append(f"{name}: {package}\n\n{_read(archive, 'LICENSE').decode().strip()}\n")
            print(f"{name}: {(WEB / name).stat().st_size} bytes")
    (WEB / "LICENCES.txt").write_text("\n\n".join(licences))


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(f"package/{name}")
    assert file is not None
    return file.read()


if __name__ == "__main__":
    main()
