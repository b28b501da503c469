"""The command line of `omlxd doctor`. Exit status 1 if something does not work, 2 for wrong flags, else 0."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from ...config import Settings, add_flags, flags_of, has_ssd_cache, read_settings, warnings_of
from ...config.address import recorded_address
from ...errors import ConfigError
from ..daemon.client import daemon_of, find_daemon
from ..watch.status import as_json
from . import disk, machine, models, network
from .finding import Finding, bad, warn
from .link import check_link
from .report import command as report

_SIGNS = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}
ADDRESS_NOTE = "as it was found; it may listen on other addresses too"
_OPTIONS = ("model_dir", "base_path", "paged_ssd_cache_dir", "paged_ssd_cache_max_size", "host", "port")
_OPTIONS += ("metal_kernels", "model")


class Report(msgspec.Struct):
    """The findings. `healthy`: nothing is bad."""

    healthy: bool
    findings: list[Finding]


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the checks. Raises ConfigError for flags that make no sense, as `omlxd serve` would."""
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--report",
        action="store_true",
        help=f"one text about this machine to paste into an issue; 2 minutes. {' '.join(report.TAKES)}",
    )
    parser.add_argument(
        "--join",
        metavar="HOST",
        help="measure the link to a machine that runs `omlxd join`, and say what --model would cost over it",
    )
    parser.add_argument("--no-disk-test", action="store_true", help="don't write and read 256 MB")
    parser.add_argument("--url", help="the daemon's address, for --host and --port")
    add_flags(parser, *_OPTIONS)
    args = parser.parse_args(argv)
    settings, mistakes = read_settings(flags_of(args, *_OPTIONS))
    if wrong := [text for text in mistakes if text.startswith("--")]:
        raise ConfigError("\n".join(wrong))
    if args.report:
        if args.json:
            raise ConfigError("--report: it is a text, and has no --json.")
        say = partial(print, flush=True)
        return report.write(settings, say, mistakes=mistakes, disk_test=not args.no_disk_test)
    notes: dict[str, str] = {}
    if args.url or not (args.host or args.port):
        settings = _at_daemon(settings, args.url, notes)
    findings: list[Finding] = []
    disk_test = not args.no_disk_test
    examined = examine(settings, mistakes, disk_test=disk_test, notes=notes)
    for finding in check_link(settings, args.join) if args.join else examined:
        findings.append(finding)
        if not args.json:
            print(as_text(finding), flush=True)
    healthy = all(finding.verdict != "bad" for finding in findings)
    print(as_json(Report(healthy, findings)) if args.json else summary(findings))
    return 0 if healthy else 1


def _at_daemon(settings: Settings, url: str | None, notes: dict[str, str]) -> Settings:
    """Return `settings` with the address of the daemon that `omlxd status` finds, and a note on others."""
    try:
        daemon = find_daemon(url, settings)
    except ConfigError:
        if url is None:  # Port 0, and no daemon holds the cache.
            return settings
        raise
    found = daemon.url
    if settings.port and found == daemon_of(settings).url:
        return settings
    if recorded := recorded_address(settings.base_path):
        _, host, port, _ = recorded
        if found == daemon_of(known := replace(settings, host=host, port=port)).url:
            return known
    notes["address"] = ADDRESS_NOTE
    parts = urlsplit(found)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return replace(settings, host=parts.hostname or "", port=port, api_key=daemon.key)


def examine(
    settings: Settings,
    mistakes: Sequence[str] = (),
    *,
    disk_test: bool = True,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Finding]:
    """Run every check in turn. One that fails itself is a finding too.

    mistakes  sentences on what is wrong in the settings' file and variables
    notes     what to say beside the findings of a check
    """
    kept, more = network.with_daemons_cache(settings)
    checks: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
        ("platform", machine.check_platform),
        ("python", machine.check_python),
        ("backend", machine.check_backend),
        ("memory", machine.check_memory),
        ("files", machine.check_files),
        ("settings", lambda: check_settings(settings, mistakes)),
        ("settings", lambda: models.check_names(settings)),
        ("base folder", lambda: disk.check_folder("base folder", settings.base_path)),
        ("cache folder", lambda: disk.check_cache_folder(settings, kept)),
        ("space", lambda: disk.check_space(kept)),
        ("written", lambda: disk.check_written(kept)),
        ("address", lambda: network.check_exposure(settings)),
        ("port", lambda: network.check_port(settings)),
        ("peer", lambda: network.check_peer(settings)),
        ("draft model", lambda: models.check_parts(settings)),
        ("model", lambda: models.check_models(settings)),
        ("clients", lambda: network.check_clients(settings)),
    ]
    if disk_test and has_ssd_cache(kept):
        checks.insert(-6, ("disk", lambda: disk.check_speed(kept)))
    for name, check in checks:
        try:
            result = check()
        except Exception as error:  # A doctor that dies of what it looks for helps nobody.
            result = bad(name, f"can't be checked: {type(error).__name__}: {error}", "Please report this.")
        for finding in result if isinstance(result, list) else [result]:
            if note := notes.get(name) or more.get(name):
                finding = replace(finding, text=f"{finding.text} ({note})")
            yield finding


def check_settings(settings: Settings, mistakes: Sequence[str]) -> list[Finding]:
    """Check for mistakes that keep `omlxd serve` from starting, unread variables, overridden values."""
    mend = "Correct it: `omlxd serve` does not start with it. The other checks take the default."
    found = [bad("settings", text.rstrip("."), mend) for text in mistakes]
    return found + [
        warn("settings", text.rstrip("."), "Mend it, or take it out.") for text in warnings_of(settings)
    ]


def as_text(finding: Finding) -> str:
    lines = [f"{_SIGNS[finding.verdict]}  {finding.check:<12}  {finding.text}"]
    if finding.mend:
        lines.append(textwrap.indent(finding.mend, " " * 20))
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    wrong = sum(finding.verdict == "bad" for finding in findings)
    weak = sum(finding.verdict == "warn" for finding in findings)
    if not wrong and not weak:
        return "all is well"
    counts = [f"{count} {what}" for count, what in ((wrong, "to mend"), (weak, "to look at")) if count]
    return ", ".join(counts)
