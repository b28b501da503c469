"""How long Hypothesis runs the state machines of the KV store."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUICK = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=int(os.environ.get("OMLXD_TEST_EXAMPLES", "250")), stateful_step_count=80)
