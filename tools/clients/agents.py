"""The agents that run as programs: what each is told so that it talks to one daemon and nobody else."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from media_files import pdf, png

from .install import npm_program
from .run import Running, start_client

CLAUDE_CODE = ("2.1.197", "2.1.332")
OPENCODE = "1.18.33"
CODEX = "0.171.0"
CONTEXT_TOKENS = 131072

FILES: dict[str, str | bytes] = {
    "alpha.txt": "The kettle is on the shelf.\n",
    "beta.txt": "The saucer is under the cup.\n" * 20,
    "gamma.txt": "The spoons are in the drawer.\n" * 5,
    "pages.pdf": pdf(["The kettle sings.\n" * 30, "The saucer listens.\n" * 30]),
    "shot.png": png(320, 200),
}


def write_files(folder: Path) -> None:
    """The files that scenarios read."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@dataclass(slots=True, frozen=True)
class Agent:
    """One agent at one version, with a home and a project folder of its own under `scratch`.

    sees  it is told that the model does
    """

    program: Path
    scratch: Path
    url: str
    model: str
    sees: bool = False
    reads_pdf: ClassVar[bool] = True

    @property
    def home(self) -> Path:
        return self.scratch / "home"

    @property
    def project(self) -> Path:
        return self.scratch / "project"

    def prepare(self) -> None:
        """A small project under git, as an agent expects one. No commits: those need a name."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.project.mkdir(parents=True, exist_ok=True)
        write_files(self.project)
        subprocess.run(["git", "init", "--quiet", str(self.project)], check=False, capture_output=True)

    def ask(self, prompt: str, *, go_on: bool = False) -> Running:
        """Run once, in a new process; `go_on` continues the last conversation."""
        raise NotImplementedError


class ClaudeCode(Agent):
    """`claude -p`, over /v1/messages. It may read files of the project, and nothing else."""

    @classmethod
    def install(cls, home: Path, version: str) -> Path:
        return npm_program(home, "@anthropic-ai/claude-code", version, "claude")

    def ask(self, prompt: str, *, go_on: bool = False) -> Running:
        models = (
            "ANTHROPIC_MODEL",
            *(f"ANTHROPIC_DEFAULT_{n}_MODEL" for n in ("OPUS", "SONNET", "HAIKU", "FABLE")),
        )
        env = {
            "HOME": str(self.home),
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            **dict.fromkeys(models, self.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_TOKENS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        command = [str(self.program), "-p", prompt, *(["--continue"] if go_on else [])]
        return start_client(command, env, self.project)


class OpenCode(Agent):
    """`opencode run`, over /v1/chat/completions."""

    @classmethod
    def install(cls, home: Path, version: str) -> Path:
        return npm_program(home, "opencode-ai", version, "opencode")

    def prepare(self) -> None:
        Agent.prepare(self)
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "omlxd",
            "options": {"baseURL": f"{self.url}/v1", "apiKey": "none"},
            "models": {
                self.model: {
                    "name": self.model,
                    "limit": {"context": CONTEXT_TOKENS, "output": 16384},
                    "attachment": True,
                    "modalities": {
                        "input": ["text", "pdf", *(["image"] if self.sees else [])],
                        "output": ["text"],
                    },
                }
            },
        }
        name = f"omlxd/{self.model}"
        config = {"autoupdate": False, "share": "disabled", "model": name, "small_model": name}
        path = self.home / ".config" / "opencode" / "opencode.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**config, "provider": {"omlxd": provider}}))

    def ask(self, prompt: str, *, go_on: bool = False) -> Running:
        off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
        env = {"HOME": str(self.home), **{f"OPENCODE_DISABLE_{name}": "1" for name in off}}
        command = [str(self.program), "run", *(["--continue"] if go_on else []), prompt]
        return start_client(command, env, self.project)


class Codex(Agent):
    """`codex exec`, over /v1/responses. It reads files by running `cat`: what it runs is what the script
    says, so its own sandbox, which not every machine can give, is off."""

    reads_pdf = False

    @classmethod
    def install(cls, home: Path, version: str) -> Path:
        return npm_program(home, "@openai/codex", version, "codex")

    def prepare(self) -> None:
        Agent.prepare(self)
        lines = [
            f"model = {json.dumps(self.model)}",
            'model_provider = "omlxd"',
            f"model_context_window = {CONTEXT_TOKENS}",
            "check_for_update_on_startup = false",
            'sandbox_mode = "danger-full-access"',
            'approval_policy = "never"',
            "[analytics]",
            "enabled = false",
            "[model_providers.omlxd]",
            'name = "omlxd"',
            f"base_url = {json.dumps(self.url + '/v1')}",
            'wire_api = "responses"',
            # It asks for the catalog only of a provider that has a key.
            'experimental_bearer_token = "none"',
            f"model_catalog_url = {json.dumps(self.url + '/v1/codex/models')}",
        ]
        path = self.home / ".codex" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")

    def ask(self, prompt: str, *, go_on: bool = False) -> Running:
        return self._ask([], prompt, go_on)

    def ask_compacting(self, prompt: str, limit: int, provider: str) -> Running:
        """Go on with a conversation of more than `limit` tokens, which is summarised first: by the server if
        `provider` is OpenAI, else by a prompt of Codex's own."""
        name = f"model_providers.omlxd.name={json.dumps(provider)}"
        return self._ask(["-c", f"model_auto_compact_token_limit={limit}", "-c", name], prompt, True)

    def _ask(self, flags: list[str], prompt: str, go_on: bool) -> Running:
        command = [str(self.program), "exec", "--skip-git-repo-check", *flags]
        command += ["resume", "--last", prompt] if go_on else [prompt]
        return start_client(command, {"HOME": str(self.home)}, self.project)
