"""`omlxd launch`: a coding agent whose environment and flags point it at this daemon; its files stay."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from ..common.files import write_atomic
from ..config import closest, is_loopback
from ..errors import ConfigError, OmlxdError
from .daemon.client import KEY_VARIABLE, Daemon, DaemonError, add_url, find_daemon

LOADING_S = 900.0
MAX_OUTPUT_TOKENS = 32_000
"""Tokens of an answer that agents ask for. A small context spares less (`output_tokens`)."""


@dataclass(frozen=True, slots=True)
class Target(Daemon):
    """A daemon, with one of its models.

    context  tokens; None where the daemon can't tell
    sees     the model takes images. Claude Code takes every model for one that does, and can't be told
    """

    model: str = field(kw_only=True)
    context: int | None = field(kw_only=True)
    sees: bool = False

    @property
    def output_tokens(self) -> int | None:
        """Tokens of one answer at most: a quarter of the context, as the agents reserve it."""
        return None if self.context is None else max(1, min(MAX_OUTPUT_TOKENS, self.context // 4))


@dataclass(frozen=True, slots=True)
class Start:
    """An agent's start: variables to set, variables to drop, flags before the user's own.

    folder  (variable, file, text): the agent reads its provider from a file of the folder that the variable
            names; written first with `--save`
    """

    variables: dict[str, str]
    dropped: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    folder: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent. begins: tokens that its first prompt takes, about: system text, tools and the
    question.
    """

    program: str
    install: str
    start: Callable[[Target], Start]
    begins: int
    wants: str = ""


# --------------------------------------------------------------------------- the agents


def _claude(target: Target) -> Start:
    models = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    models += [f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU", "FABLE")]
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key or "omlxd",
        **dict.fromkeys(models, target.model),
        # Its text would change at the head of every conversation's prompt.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # Behind every tool result it would count down, and the next prompt would leave it out.
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
    }
    if target.context is not None:
        # Unset, Claude Code takes a model that it doesn't know for one of a million tokens.
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(target.output_tokens)
    # With a key as well it would send both; with a cloud chosen it would not come here at all.
    clouds = [f"CLAUDE_CODE_USE_{name}" for name in ("BEDROCK", "VERTEX", "FOUNDRY")]
    return Start(variables, ("ANTHROPIC_API_KEY", *clouds))


def _codex(target: Target) -> Start:
    # It asks for the catalog only of a provider that has a key.
    provider = {
        "name": "omlxd",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
        "model_catalog_url": f"{target.url}/v1/codex/models",
    }
    table = ", ".join(f"{name} = {_toml(value)}" for name, value in provider.items())
    settings = [
        "model_provider = " + _toml("omlxd"),
        f"model_providers.omlxd = {{{table}}}",
        "model = " + _toml(target.model),
    ]
    if target.context is not None:
        settings.append(f"model_context_window = {target.context}")
    if not target.sees:
        settings.append("features.view_image = false")  # Its tool that shows the model an image.
    flags = [word for setting in settings for word in ("-c", setting.replace(" = ", "=", 1))]
    return Start({KEY_VARIABLE: target.key or "omlxd"}, flags=tuple(flags))


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _opencode(target: Target) -> Start:
    # PDFs are read for every model: as text, or as pictures of their pages.
    inputs = ["text", "pdf", *(["image"] if target.sees else [])]
    modalities = {"input": inputs, "output": ["text"]}
    model: dict[str, Any] = {"name": target.model, "attachment": True, "modalities": modalities}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": target.output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "omlxd",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key or "omlxd"},
        "models": {target.model: model},
    }
    name = f"omlxd/{target.model}"
    config = {"model": name, "small_model": name, "provider": {"omlxd": provider}}
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _openai(target: Target, base: str) -> dict[str, str]:
    return {base: f"{target.url}/v1", "OPENAI_API_KEY": target.key or "omlxd"}


def _crush(target: Target) -> Start:
    model: dict[str, Any] = {"id": target.model, "name": target.model, "supports_attachments": target.sees}
    if target.context is not None:
        model |= {"context_window": target.context, "default_max_tokens": target.output_tokens}
    provider = {
        "type": "openai-compat",
        "base_url": f"{target.url}/v1",
        "api_key": f"${KEY_VARIABLE}",
        "models": [model],
    }
    chosen = {"provider": "omlxd", "model": target.model}
    config = {"providers": {"omlxd": provider}, "models": {"large": chosen, "small": chosen}}
    folder = ("CRUSH_GLOBAL_CONFIG", "crush.json", json.dumps(config, indent=2) + "\n")
    return Start({KEY_VARIABLE: target.key or "omlxd"}, folder=folder)


def _pi(target: Target) -> Start:
    model: dict[str, Any] = {"id": target.model, "input": ["text", *(["image"] if target.sees else [])]}
    if target.context is not None:
        model |= {"contextWindow": target.context, "maxTokens": target.output_tokens}
    provider = {
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "apiKey": f"${KEY_VARIABLE}",
        "models": [model],
    }
    text = json.dumps({"providers": {"omlxd": provider}}, indent=2) + "\n"
    return Start(
        {KEY_VARIABLE: target.key or "omlxd"},
        flags=("--provider", "omlxd", "--model", target.model),
        folder=("PI_CODING_AGENT_DIR", "models.json", text),
    )


def _qwen(target: Target) -> Start:
    variables = _openai(target, "OPENAI_BASE_URL") | {"OPENAI_MODEL": target.model}
    if target.output_tokens is not None:
        variables["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(target.output_tokens)
    return Start(variables, flags=("--auth-type", "openai", "--model", target.model))


def _goose(target: Target) -> Start:
    # It adds v1/chat/completions by itself.
    variables = _openai(target, "OPENAI_HOST") | {"OPENAI_HOST": target.url}
    variables |= {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": target.model}
    if target.context is not None:
        variables["GOOSE_CONTEXT_LIMIT"] = str(target.context)
    return Start(variables, ("OPENAI_BASE_PATH",))


def _aider(target: Target) -> Start:
    models = dict.fromkeys(
        ("AIDER_MODEL", "AIDER_WEAK_MODEL", "AIDER_EDITOR_MODEL"), f"openai/{target.model}"
    )
    quiet = {"AIDER_SHOW_MODEL_WARNINGS": "false"}  # It asks about models that it has no price of.
    return Start(_openai(target, "OPENAI_API_BASE") | models | quiet)


def _gemini(target: Target) -> Start:
    variables = {"GOOGLE_GEMINI_BASE_URL": target.url, "GEMINI_API_KEY": target.key or "omlxd"}
    # With one of these it would go to Google's cloud.
    clouds = ("GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA", "CLOUD_SHELL")
    # With a base URL it takes itself for behind a gateway, and refuses, unless a file says how it signs in.
    settings = json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}}) + "\n"
    folder = ("GEMINI_CLI_HOME", ".gemini/settings.json", settings)
    return Start({**variables, "GEMINI_MODEL": target.model}, clouds, folder=folder)


def _continue(target: Target) -> Start:
    model: dict[str, Any] = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *(["image_input"] if target.sees else [])],
    }
    if target.context is not None:
        limits = {"contextLength": target.context, "maxTokens": target.output_tokens}
        model["defaultCompletionOptions"] = limits
    config = {"name": "omlxd", "version": "1.0.0", "schema": "v1", "models": [model]}
    text = json.dumps(config, indent=2) + "\n"  # JSON is YAML.
    variables = {KEY_VARIABLE: target.key or "omlxd", "CONTINUE_TELEMETRY_ENABLED": "0"}
    return Start(variables, folder=("CONTINUE_GLOBAL_DIR", "config.yaml", text))


def _copilot(target: Target) -> Start:
    variables = {
        "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_API_KEY": target.key or "omlxd",
        "COPILOT_MODEL": target.model,
        "COPILOT_OFFLINE": "true",
    }
    if target.context is not None and target.output_tokens is not None:
        variables["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"] = str(target.context - target.output_tokens)
        variables["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"] = str(target.output_tokens)
    return Start(variables, ("COPILOT_PROVIDER_BEARER_TOKEN",))


AGENTS = {
    "claude": Agent(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        _claude,
        20_000,
        # On an older Node npm takes an old version, whose prompt is twice as long.
        " on Node 22 or newer",
    ),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex, 10_000),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode, 10_000),
    "crush": Agent("crush", "npm install -g @charmland/crush", _crush, 10_000),
    "pi": Agent("pi", "npm install -g @earendil-works/pi-coding-agent", _pi, 2_000, " on Node 22 or newer"),
    "gemini": Agent("gemini", "npm install -g @google/gemini-cli", _gemini, 20_000),
    "qwen-code": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen, 20_000),
    "continue": Agent("cn", "npm install -g @continuedev/cli", _continue, 2_000),
    "goose": Agent("goose", "brew install block-goose-cli", _goose, 8_000),
    "aider": Agent("aider", "uv tool install aider-chat", _aider, 5_000),
    "copilot": Agent("copilot", "npm install -g @github/copilot", _copilot, 20_000),
}


# --------------------------------------------------------------------------- the daemon


class _Extension(msgspec.Struct):
    state: str = "ready"
    input_modalities: list[str] = []
    kind: str = "chat"


class _Model(msgspec.Struct):
    id: str
    max_input_tokens: int | None = None
    omlxd: _Extension = msgspec.field(default_factory=_Extension)


class Models(msgspec.Struct):
    data: list[_Model]


def find_target(daemon: Daemon, name: str | None) -> Target:
    """Return the model called `name`, or the first one for None, once it has loaded. Raises DaemonError."""
    deadline = time.monotonic() + LOADING_S
    announced, pause_s = False, 0.1
    while True:
        models = daemon.fetch("/v1/models", Models).data
        model = _chosen(models, name) or _called(daemon, name or "", models)
        if model.omlxd.kind != "chat":
            raise DaemonError(f"{model.id} answers no prompts; name another one with --model.")
        if model.omlxd.state != "loading":
            sees, most = "image" in model.omlxd.input_modalities, model.max_input_tokens
            return Target(daemon.url, daemon.key, model=model.id, context=most, sees=sees)
        if time.monotonic() > deadline:
            raise DaemonError(f"{model.id} is still loading; see the log of the daemon at {daemon.url}.")
        if not announced:
            print(f"omlxd: waiting for {model.id} to load", file=sys.stderr, flush=True)
            announced = True
        time.sleep(pause_s)
        pause_s = min(2.0, 1.5 * pause_s)  # Each look is a line of the daemon's log.


def _chosen(models: Sequence[_Model], name: str | None) -> _Model | None:
    """Return the model with the id `name`; None without one."""
    if not models:
        raise DaemonError("The daemon serves no model.")
    if name is None:
        models = [model for model in models if model.omlxd.kind == "chat"] or models
        return next((model for model in models if model.omlxd.state in ("ready", "loading")), models[0])
    return next((model for model in models if name in (model.id, model.id.rpartition("/")[2])), None)


def _called(daemon: Daemon, name: str, models: Sequence[_Model]) -> _Model:
    """Return the model that the daemon knows by an alias. Raises DaemonError."""
    try:
        return daemon.fetch("/v1/models/" + quote(name), _Model)
    except DaemonError:
        there_are = ", ".join(model.id for model in models)
        near = closest(name, [spelt for model in models for spelt in (model.id.rpartition("/")[2], model.id)])
        raise DaemonError(f"There is no model {name!r} there{near}; the models are: {there_are}.") from None


# --------------------------------------------------------------------------- the command


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Start the agent in place of this process; returns only with `--print-env`. Raises OmlxdError."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    own, rest = argv[:at], argv[at + 1 :]
    parser.usage = (
        "omlxd launch AGENT [--url URL] [--model NAME] [--save] [--print-env] [-- ARGS …], or --list"
    )
    parser.add_argument(
        "agent", nargs="?", choices=list(AGENTS), help="which agent; it is looked for on the PATH"
    )
    parser.add_argument("--list", action="store_true", help="say which agents are installed, and where")
    add_url(parser)
    parser.add_argument(
        "--model", metavar="NAME", help="default: the first one that is loaded, else the first one"
    )
    parser.add_argument(
        "--print-env", action="store_true", help='print shell commands instead: eval "$(omlxd launch …)"'
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the file that crush, gemini and pi read their settings from, below ~/.omlxd/launch",
    )
    parser.epilog = "What follows -- goes to the agent as it is."
    args, unknown = parser.parse_known_args(own)
    if unknown:
        near = closest(unknown[0], [flag for action in parser._actions for flag in action.option_strings])
        raise ConfigError(
            f"{unknown[0]} is not a flag of `omlxd launch`{near}; flags of {args.agent} go after --."
        )
    if args.list:
        print(as_list())
        return 0
    if args.agent is None:
        raise ConfigError(f"Say which agent: {', '.join(AGENTS)}.")
    agent = AGENTS[args.agent]
    daemon = find_daemon(args.url)
    path = None if args.print_env else _program(agent)
    target = find_target(daemon, args.model)
    start = _with_folder(agent, agent.start(target), args.save)
    if warning := too_small(agent, target):
        print(f"omlxd: {warning}", file=sys.stderr)
    if path is None:
        print(shell_text(agent, start, rest))
        return 0
    sys.stdout.flush()
    os.execve(path, [agent.program, *start.flags, *rest], environment(os.environ, start, daemon.url))


def as_list() -> str:
    """Format a line an agent: its path, or how to install it."""
    width = max(map(len, AGENTS))
    places = {name: shutil.which(agent.program) for name, agent in AGENTS.items()}
    return "\n".join(
        f"{name:{width}}  {places[name] or f'not installed: {agent.install}{agent.wants}'}"
        for name, agent in AGENTS.items()
    )


def _with_folder(agent: Agent, start: Start, save: bool) -> Start:
    """Write the agent's folder, and return `start` with its variable. Raises OmlxdError."""
    if start.folder is None:
        return start
    variable, name, text = start.folder
    folder = Path("~/.omlxd/launch").expanduser() / agent.program
    if not save and not (folder / name).exists():
        raise OmlxdError(
            f"{agent.program} reads its provider from a file alone; --save writes {folder / name}, and "
            "leaves its own files as they are."
        )
    # One that --save wrote is of this command: it is kept up to date with the daemon and its model.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(folder / name, text.encode())
    return replace(start, variables={**start.variables, variable: str(folder)})


def too_small(agent: Agent, target: Target) -> str:
    """Warn if the context has no room for the agent's first prompt and an answer; else ""."""
    if target.context is None or target.context - (target.output_tokens or 0) >= agent.begins:
        return ""
    return (
        f"the context of {target.model} is {target.context} tokens; {agent.program} begins with about "
        f"{agent.begins}, so it will soon fail. Take a model with 32768 or more."
    )


def environment(environ: Mapping[str, str], start: Start, url: str) -> dict[str, str]:
    """Return `environ` as the agent gets it."""
    variables = {name: value for name, value in environ.items() if name not in start.dropped}
    variables |= start.variables
    host = urlsplit(url).hostname or ""
    if is_loopback(host) and any(name.lower().endswith("_proxy") for name in environ):
        for name in ("NO_PROXY", "no_proxy"):
            variables[name] = ",".join(filter(None, (environ.get(name, ""), host)))
    return variables


def shell_text(agent: Agent, start: Start, rest: Sequence[str]) -> str:
    """Return lines for a POSIX shell with the same effect. Flags become a function of the program's name."""
    lines = [f"unset {' '.join(start.dropped)}"] if start.dropped else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in start.variables.items()]
    if start.flags or rest:
        words = shlex.join([*start.flags, *rest])
        lines.append(f'{agent.program}() {{ command {agent.program} {words} "$@"; }}')
    return "\n".join(lines)


def _program(agent: Agent) -> str:
    path = shutil.which(agent.program)
    if path is None:
        raise OmlxdError(
            f"{agent.program} is not on the PATH; install it with `{agent.install}`{agent.wants}."
        )
    return path
