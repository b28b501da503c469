"""`omlxd bench MODEL`: what the cache saves on this machine, and what a quantised KV cache costs in quality.

A daemon of its own, with an empty SSD cache, answers a prompt of each length three times: cold, from RAM,
and from SSD after a restart (which the operating system may still hold in its page cache). Then a program
measures the perplexity of a text with KV in fewer bits. All prompts and the text are chapters I to III of
Lewis Carroll's "Alice's Adventures in Wonderland" of 1865, which is in the public domain.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from ..common.units import human
from ..config import add_flags, settings_of
from ..errors import ConfigError
from .chat.conversation import Answer, Chunk, ask_body
from .daemon.client import Daemon, DaemonError, Usage
from .daemon.own import own_daemon
from .daemon.owner_api import InstalledStatuses, ModelStatus
from .launch import find_target
from .models.command import as_listed
from .watch.status import as_json

TEXT = Path(__file__).parents[1] / "models" / "bench_text.txt"
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SHORTEST = 128
ANSWER_TOKENS = 32
PERPLEXITY_TOKENS, QUICK_TOKENS = 4096, 1024
COUNT_S = 60.0
WRITE_S = 600.0
"""Seconds for blocks to reach the SSD."""
_UNWRITTEN = ("kv_unwritten_blocks", "kv_store_queue_bytes")


class LengthResult(msgspec.Struct, kw_only=True):
    """Results of one prompt length. Seconds to the first token, tokens, tokens a second; null where `trouble`
    says why.

    equal_tokens  the three answers, at temperature 0, are the same
    write_s       from the end of the cold answer until all its blocks are on SSD
    """

    prompt_tokens: int = 0
    cold_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    ram_s: float | None = None
    ram_cached: int = 0
    ssd_s: float | None = None
    ssd_cached: int = 0
    equal_tokens: bool | None = None
    write_s: float | None = None
    trouble: str = ""


class KVResult(msgspec.Struct, kw_only=True):
    """Results of one KV type. `same_choice`: part of all places with unquantised KV's likeliest token."""

    kv: str
    tokens: int = 0
    perplexity: float | None = None
    same_choice: float | None = None
    trouble: str = ""


class Report(msgspec.Struct, kw_only=True):
    """The results. `cache_bytes`: of the SSD cache after all lengths."""

    model: str
    backend: str
    speed: str
    context_length: int
    kv_bytes_per_token: int
    cache_bytes: int = 0
    lengths: list[LengthResult] = []
    kv: list[KVResult] = []


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the verb. Raises OmlxdError."""
    parser.add_argument("model", help="a folder, a name of `omlxd models list`, a hub id or a GGUF file")
    parser.add_argument(
        "--lengths", metavar="N,…", help="prompt lengths in tokens, as 1k,4k; default: 1k up to the context"
    )
    parser.add_argument("--quick", action="store_true", help="1k alone, and a shorter text for perplexity")
    parser.add_argument("--no-perplexity", action="store_true", help="measure no perplexity")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_flags(parser, "base_path", "model_dir", "metal_kernels")
    args = parser.parse_args(argv)
    wanted = _lengths(args.lengths) if args.lengths else (LENGTHS[:1] if args.quick else None)
    tokens = 0 if args.no_perplexity else QUICK_TOKENS if args.quick else PERPLEXITY_TOKENS
    model, flags = _named(args)
    report = measure(model, wanted, tokens, (lambda text: None) if args.json else _show, flags)
    if args.json:
        print(as_json(report))
    return 0


def _named(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the model, and further flags of a daemon that has it."""
    given = {name: getattr(args, name) for name in ("config", "base_path", "model_dir", "metal_kernels")}
    model: str = args.model
    if args.model_dir is None:
        model, given["model_dir"] = as_listed(model, settings_of(args, *given))
    flags = [("--" + name.replace("_", "-"), str(value)) for name, value in given.items() if value]
    return model, [word for flag in flags for word in flag]


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.lower().split(",")
    if not all(re.fullmatch(r"\d{1,18}k?", part.strip()) for part in parts):
        raise ConfigError(f"--lengths: {text!r} is no list of lengths; write 1k,4k.")
    lengths = [int(part.strip().rstrip("k")) * (1024 if "k" in part else 1) for part in parts]
    if min(lengths) < SHORTEST:
        raise ConfigError(f"--lengths: {min(lengths)} is too short; {SHORTEST} is the least.")
    return tuple(sorted(set(lengths)))


# --------------------------------------------------------------------------- speed


class _Count(msgspec.Struct):
    input_tokens: int


def measure(
    model: str,
    wanted: Sequence[int] | None,
    perplexity_tokens: int,
    show: Callable[[str], None],
    more: Sequence[str] = (),
) -> Report:
    """Measure all lengths and KV types. Raises OmlxdError.

    wanted             prompt lengths; None: all up to the context
    perplexity_tokens  0: no perplexity
    show               takes each line of text as soon as it is measured
    more               flags of the daemon that is measured
    """
    with tempfile.TemporaryDirectory(prefix="omlxd-bench-") as folder:
        flags = (*more, "--model", model, "--paged-ssd-cache-dir", folder, "--hot-cache-write", "through")
        with own_daemon(*flags) as daemon:
            bench = _Bench(daemon)
            report, path = bench.report(), bench.folder()
            most = (report.context_length - ANSWER_TOKENS) * 97 // 100
            lengths = [n for n in wanted or LENGTHS if n <= most]
            if too_long := [str(n) for n in wanted or () if n > most]:
                _say(f"--lengths: {', '.join(too_long)}: more than the {most} tokens that fit the context")
            if wanted is None and (not lengths or most > lengths[-1] * 1.1):
                lengths.append(most)
            if not lengths or lengths[0] < SHORTEST:
                raise DaemonError(f"The context of {model} is {report.context_length} tokens: none fits.")
            show(_head(report))
            answers = [bench.cold_and_hot(length) for length in lengths]
            report.cache_bytes = bench.cache_bytes()
        _say("restarting")
        with own_daemon(*flags) as daemon:
            bench = _Bench(daemon)
            show("\nSeconds to the first token\n" + _line(_LENGTHS, _LENGTHS))
            for length, (result, text) in zip(lengths, answers, strict=True):
                report.lengths.append(bench.after_restart(length, result, text))
                show(_length_row(result))
            show(f"{human(report.cache_bytes)} on SSD in all")
    if perplexity_tokens:
        _say(f"perplexity of {perplexity_tokens} tokens")
        for row in perplexity(path, perplexity_tokens, "made float32" in report.speed):
            report.kv.append(row)
            if len(report.kv) == 1:
                show(f"\nPerplexity of {row.tokens} tokens\n" + _line(_KV, _KV))
            show(_kv_row(row, report.kv[0]))
    return report


class _Bench:
    """A daemon with the model loaded, and prompts for it."""

    def __init__(self, daemon: Daemon):
        self._daemon = daemon
        _say("loading the model")
        self._model = find_target(daemon, None).model
        self._text = TEXT.read_text()
        _, usage = self._ask(self._text[:1500])  # The model is loaded by now, and its kernels are made.
        self._letters_per_token = 1500 / usage.prompt_tokens

    def report(self) -> Report:
        status = self._status()
        return Report(
            model=status.id,
            backend=status.backend,
            speed=status.speed,
            context_length=status.context_length,
            kv_bytes_per_token=status.kv_bytes_per_token,
        )

    def folder(self) -> Path:
        models = self._daemon.fetch("/omlxd/models", InstalledStatuses).models
        return Path(next(model.folder or "" for model in models if model.id == self._model))

    def cache_bytes(self) -> int:
        cold = self._daemon.status().cold
        return cold.bytes if cold else 0

    def cold_and_hot(self, length: int) -> tuple[LengthResult, str]:
        """Return the result so far, and the cold answer."""
        _say(f"{length} tokens, cold")
        result, prompt = LengthResult(prompt_tokens=length), self._prompt(length)
        try:
            cold, usage = self._ask(prompt)
            result.write_s = self._wait_written()
            hot, hot_usage = self._ask(prompt)
        except DaemonError as error:
            result.trouble = error.message
            return result, ""
        result.prompt_tokens, result.ram_cached = usage.prompt_tokens, hot_usage.omlxd.all
        result.cold_s, result.ram_s = cold.first_s, hot.first_s
        result.prefill_tokens_per_s = (usage.prompt_tokens - usage.omlxd.all) / result.cold_s
        result.decode_tokens_per_s = cold.tokens_per_s
        result.equal_tokens = hot.text == cold.text
        _say(f"{result.prompt_tokens} tokens: cold {result.cold_s:.3f} s, from RAM {result.ram_s:.3f} s")
        return result, cold.text

    def after_restart(self, length: int, result: LengthResult, text: str) -> LengthResult:
        """Return `result` with the time from SSD."""
        if result.trouble:
            return result
        _say(f"{length} tokens, from SSD")
        try:
            answer, usage = self._ask(self._prompt(length))
        except DaemonError as error:
            result.trouble = error.message
            return result
        result.ssd_s, result.ssd_cached = answer.first_s, usage.omlxd.all
        result.equal_tokens = bool(result.equal_tokens) and answer.text == text
        return result

    def _prompt(self, length: int) -> str:
        """Make a prompt of about `length` tokens, rather fewer; no two lengths share a first block."""
        letters = int(length * self._letters_per_token)
        head = f"{length} words and more of a story. "
        text = head + self._text * (2 * letters // len(self._text) + 1)
        messages = [{"role": "user", "content": text[:letters]}]
        body = msgspec.json.encode({"model": self._model, "messages": messages})
        counted = self._daemon.fetch("/v1/messages/count_tokens", _Count, body, COUNT_S).input_tokens
        return text[: letters * length // counted]

    def _ask(self, prompt: str) -> tuple[Answer, Usage]:
        answer = Answer()
        body = ask_body(model=self._model, prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0.0)
        with closing(self._daemon.stream("/v1/completions", body, Chunk)) as chunks:
            for chunk in chunks:
                answer.add(chunk)
        if not answer.text:
            answer.token_came()  # None has text: the answer's end stands for the first.
        return answer, answer.usage or Usage()

    def _wait_written(self) -> float:
        """Return the seconds until all blocks are on SSD."""
        began = time.perf_counter()
        while time.perf_counter() - began < WRITE_S:
            status = self._status()
            if not status.values_age_s and not any(map(status.values.get, _UNWRITTEN)):
                break
            time.sleep(0.01)
        return time.perf_counter() - began

    def _status(self) -> ModelStatus:
        return next(m for m in self._daemon.status().models if m.id == self._model)


# --------------------------------------------------------------------------- quality


def perplexity(folder: Path, tokens: int, float32: bool) -> Generator[KVResult]:
    """Measure the perplexity of each KV type, in a program of its own: it needs MLX. Raises DaemonError."""
    arguments = [str(folder), str(TEXT), str(tokens), str(int(float32))]
    command = [sys.executable, "-m", "omlxd.engine.server.measure.perplexity", *arguments]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        try:
            yield from (msgspec.json.decode(line, type=KVResult) for line in process.stdout)
        except BaseException:
            process.kill()
            raise
        if process.wait():
            log.seek(0)
            last = (log.read().strip() or "it gives no reason").splitlines()[-1]
            raise DaemonError(f"The perplexity can't be measured: {last}")


# --------------------------------------------------------------------------- what is shown

_LENGTHS = ("TOKENS", "PREFILL/S", "DECODE/S", "COLD", "RAM", "SPEED-UP", "SSD", "SPEED-UP", "EQUAL", "WRITE")
_KV = ("KV BITS".ljust(16), "PERPLEXITY", "CHANGE", "SAME FIRST CHOICE")


def _line(head: Sequence[str], cells: Sequence[str]) -> str:
    """Format `cells` below the columns of `head`: lines come one by one, so widths are fixed."""
    return "  ".join(c.ljust(max(len(name), 7)) for name, c in zip(head, cells, strict=True)).rstrip()


def _head(report: Report) -> str:
    runs_on = f"{report.backend} ({report.speed})" if report.speed else report.backend
    kv = f"{human(report.kv_bytes_per_token)} of KV a token"
    return f"{report.model} on {runs_on}\ncontext {report.context_length} tokens, {kv}"


def _length_row(result: LengthResult) -> str:
    def faster(seconds: float | None) -> str:
        return f"{result.cold_s / seconds:.1f}" if seconds and result.cold_s else "-"

    if result.trouble:
        return f"{result.prompt_tokens}: {result.trouble}"
    cells = (
        str(result.prompt_tokens),
        _number(result.prefill_tokens_per_s, 0),
        _number(result.decode_tokens_per_s, 1),
        _number(result.cold_s, 3),
        _number(result.ram_s, 3),
        faster(result.ram_s),
        _number(result.ssd_s, 3),
        faster(result.ssd_s),
        "yes" if result.equal_tokens else "NO",
        _number(result.write_s, 2),
    )
    return _line(_LENGTHS, cells)


def _kv_row(row: KVResult, plain: KVResult) -> str:
    if row.trouble:
        return f"{row.kv}: {row.trouble}"
    perplexity, base = row.perplexity or 0.0, plain.perplexity or 1.0
    change, same = f"{perplexity / base - 1:+.2%}", f"{row.same_choice or 0:.1%}"
    return _line(_KV, (row.kv, f"{perplexity:.3f}", change, same))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _show(text: str) -> None:
    print(text, flush=True)


def _say(text: str) -> None:
    print(f"omlxd: {text}", file=sys.stderr, flush=True)
