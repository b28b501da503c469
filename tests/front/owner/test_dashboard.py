"""config/grafana.json: every metric in it is one that a daemon shows."""

import json
import re
from pathlib import Path

from app_client import client
from fake_engine import FakeEngine, FakeEngines
from prometheus_client.parser import text_string_to_metric_families as parse

from omlxd.front.app import create_app
from omlxd.front.owner.metrics import HELP
from omlxd.kv.ledger.ledger import LedgerStats

DASHBOARD = json.loads((Path(__file__).parents[3] / "config" / "grafana.json").read_text())
METRIC = re.compile(r"\b(?:vllm:|omlxd_|process_)\w+")


def expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [*found, *(each["definition"] for each in DASHBOARD["templating"]["list"] if "definition" in each)]


async def test_every_metric_of_the_dashboard_is_shown():
    engine = FakeEngine()
    # The names that engine/server/metrics.py gives; test_metrics.py holds them to a real one's.
    engine.values = dict.fromkeys(HELP, 1.0)
    engines = FakeEngines(engine)
    engines.cold.stats = LedgerStats(*[0] * len(LedgerStats.__dataclass_fields__))
    async with client(create_app(engines)) as http:
        text = (await http.get("/metrics")).text
    shown = {sample.name for family in parse(text) for sample in family.samples}
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    shown |= {"process_resident_memory_bytes"}  # Of prometheus-client itself, on Linux alone.
    assert len(asked) > 25
    assert asked <= shown


def test_panels_stand_beside_each_other_and_have_their_own_ids():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_rates_are_of_counters_and_quantiles_of_buckets():
    for expression in expressions():
        for name in re.findall(r"(?:rate|increase)\(([\w:]+)", expression):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), expression
        if "histogram_quantile" in expression:
            assert "_bucket" in expression and "le" in expression
        assert expression.count("(") == expression.count(")")
