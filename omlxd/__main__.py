"""`python -m omlxd`: the same as the `omlxd` command."""

import sys

from .cli import main

sys.exit(main())
