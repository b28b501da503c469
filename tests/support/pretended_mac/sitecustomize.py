"""Python imports this first where its path begins with this folder, as in programs of `--pretend-metal`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import pretend_metal

pretend_metal.install()
