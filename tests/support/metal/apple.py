"""Apple's own compiler, where one is: `xcrun metal` of Xcode. It has never run on this code.

On a Mac MLX compiles a kernel by the language of that Mac's system when it is called. This compiles it for
macOS 14, the oldest that MLX is for, as well.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

from .source import Printed

OLDEST = "metal3.1"
BEFORE = "#include <metal_stdlib>\n#include <metal_simdgroup>\nusing namespace metal;\n"
BEFORE += '#include "mlx/backend/metal/kernels/utils.h"\n'
"""What MLX puts before a kernel of `mx.fast.metal_kernel`."""


@functools.cache
def is_here() -> bool:
    if shutil.which("xcrun") is None:
        return False
    return subprocess.run(["xcrun", "-sdk", "macosx", "-f", "metal"], capture_output=True).returncode == 0


@functools.lru_cache(maxsize=256)
def refused(source: Printed) -> str:
    """Return what Apple's compiler says of a kernel, or "": it compiles, or there is no compiler."""
    if not is_here():
        return ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.metal"
        instance = f"template decltype({source.name}{source.instance}) {source.name}{source.instance};\n"
        file.write_text(BEFORE + source.text + (instance if source.instance else ""))
        headers = Path(mx.__file__).parent / "include"
        command = ["xcrun", "-sdk", "macosx", "metal", f"-std={OLDEST}", f"-I{headers}", "-c", str(file)]
        done = subprocess.run([*command, "-o", f"{folder}/kernel.air"], capture_output=True, text=True)
        return done.stderr if done.returncode else ""
