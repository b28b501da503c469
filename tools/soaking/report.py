"""What came of a soak, in figures and words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """What came of it. `improper`: answers that were none, in words."""

    answers: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    improper: list[str] = field(default_factory=list)
    slopes: dict[str, float] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    def text(self, seconds: float) -> str:
        lines = [f"{seconds:.0f} s, {sum(self.answers.values())} requests"]
        lines += [f"  {count:6d}  {what}" for what, count in sorted(self.answers.items())]
        lines += ["what was done to it:"] + [f"  {n:6d}  {what}" for what, n in sorted(self.events.items())]
        lines += ["growth a minute:"] + [f"  {slope:+9.3f}  {what}" for what, slope in self.slopes.items()]
        lines += ["at the end:"] + [f"  {what}: {value}" for what, value in self.ends.items()]
        return "\n".join(lines + [f"IMPROPER: {problem}" for problem in self.improper[:20]])
