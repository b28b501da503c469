"""`python -m omlxd`: the same as the `omlxd` command."""

import sys

from .cli.main import main

sys.exit(main())
