"""`python -m omlxd.engine.server.measure.perplexity FOLDER TEXT TOKENS FLOAT32`: for `omlxd bench`.

Prints a line of JSON a KV type: of the first TOKENS tokens of the file TEXT. FLOAT32 1: with weights
made float32, as the engine has them on a CPU. A program, so that it sets MLX up as an engine does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ...process.prepare import prepare_mlx


def main(folder: str, text: str, tokens: str, float32: str) -> None:
    prepare_mlx()
    from ...mlx_adapter.model.perplexity import measure_folder  # It imports MLX.

    for row in measure_folder(Path(folder), Path(text).read_text(), int(tokens), float32 == "1"):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
