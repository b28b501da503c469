"""The table of what came since 2744a18 names files that are there."""

from pathlib import Path

from tools.house_counts import ADDED, REPLACED, added_lines

ROOT = Path(__file__).resolve().parents[2]


def test_each_pattern_means_files():
    package = ROOT / "omlxd"
    patterns = [pattern for own in ADDED.values() for pattern in own] + list(REPLACED)
    assert [pattern for pattern in patterns if not any(package.glob(pattern))] == []
    assert all(added_lines(ROOT).values())
