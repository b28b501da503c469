"""Renders chat templates in a process of its own (common/child_loop.py).

A template is a program from a model's folder and may loop or take all memory; here it costs one request. The
environment is transformers' own (`_compile_jinja_template`), copied because importing transformers takes a
second and 60 MB; a test compares them.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT_CHARS = 64 << 20
ERROR_CHARS = 1000
"""Characters of a failing template's message, which may quote all of its input."""


class _Generation(jinja2.ext.Extension):
    """Renders the text in `{% generation %}`, which marks an answer for training, as it is."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> str:
        return caller()


class _Dict:
    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **values: Any) -> None:  # `namespace(self=…)` is allowed.
        self, *rest = args
        values = dict(*rest, **values)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def answer(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    """Return (text, "") or ("", why the template failed)."""
    texts: list[str] = []
    length = 0
    try:
        for text in _compiled(template).generate(**variables):
            texts.append(text)
            length += len(text)
            if length > TEXT_CHARS:
                return "", f"its text is longer than {TEXT_CHARS} characters"
        return "".join(texts), ""
    except MemoryError:
        return "", "it needs more memory than a template may have"
    except RecursionError:
        return "", "it calls itself without end"
    except Exception as error:
        return "", (str(error) or type(error).__name__)[:ERROR_CHARS]
