"""`omlxd launch` as a process, with programs on the PATH that tell what they were given."""

import json
import os
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROGRAM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"args": sys.argv[1:], "env": dict(os.environ)}}))
sys.exit(7)
"""


def entry(id="org/tiny", context=4096, state="ready", **more):
    return {"id": id, "max_input_tokens": context, "omlxd": {"state": state, **more}}


class FakeDaemon:
    """Serves /v1/models: each answer but the last one is given once. `key` "": none is asked for."""

    def __init__(self):
        self.answers = [[entry(), entry("org/other", 200_000)]]
        self.key = ""
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format, *args):
                pass

            def do_GET(self):
                if self.path == "/v1/models/by%20alias":
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(json.dumps(entry("org/other", 200_000)).encode())
                    return
                ok = not daemon.key or self.headers.get("authorization") == f"Bearer {daemon.key}"
                data = daemon.answers.pop(0) if len(daemon.answers) > 1 else daemon.answers[0]
                body = data if isinstance(data, bytes) else json.dumps({"data": data}).encode()
                self.send_response(200 if ok and self.path == "/v1/models" else 401 if not ok else 404)
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def daemon():
    fake = FakeDaemon()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def launch(tmp_path, daemon):
    """Runs `omlxd launch` with its own home and a PATH that holds the three agents and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in (
        "claude",
        "codex",
        "opencode",
        "crush",
        "pi",
        "gemini",
        "qwen",
        "goose",
        "aider",
        "copilot",
        "cn",
    ):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)

    def go(*words, **env):
        whole = {"PATH": str(folder), "HOME": str(tmp_path), "PYTHONPATH": str(REPO)}
        whole |= {"OMLXD_PORT": str(daemon.port), **env}
        command = [sys.executable, "-m", "omlxd", "launch", *words]
        return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    return go


def given(done):
    """(arguments, environment) that the agent got. Its exit status is the command's."""
    assert done.returncode == 7, done.stderr
    told = json.loads(done.stdout)
    return told["args"], told["env"]


def test_claude(launch, daemon):
    args, env = given(launch("claude", "--", "-p", "hi", "--model", "x", ANTHROPIC_API_KEY="sk", KEPT="1"))
    assert args == ["-p", "hi", "--model", "x"]
    assert env["ANTHROPIC_BASE_URL"] == daemon.url and env["ANTHROPIC_AUTH_TOKEN"] == "omlxd"
    models = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"]
    models += [f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU", "FABLE")]
    assert {env[name] for name in models} == {"org/tiny"}
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "1024"
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert env["CLAUDE_CODE_SUBAGENT_MODEL"] == "org/tiny"
    assert "ANTHROPIC_API_KEY" not in env and env["KEPT"] == "1" and "NO_PROXY" not in env


def test_another_model_address_and_key(launch, daemon):
    daemon.key = "secret1"
    words = ("claude", "--url", daemon.url + "/v1/", "--model", "other")
    _, env = given(launch(*words, OMLXD_API_KEY="secret1", OMLXD_PORT="1"))
    assert env["ANTHROPIC_BASE_URL"] == daemon.url and env["ANTHROPIC_AUTH_TOKEN"] == "secret1"
    assert env["ANTHROPIC_MODEL"] == "org/other"
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "200000"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "32000"


def test_a_model_is_called_by_an_alias(launch, daemon):
    _, env = given(launch("claude", "--model", "by alias"))
    assert env["ANTHROPIC_MODEL"] == "org/other" and env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "200000"


def test_one_that_is_loaded_goes_before_one_that_cannot_be(launch, daemon):
    daemon.answers = [[entry("a/half", state="failed"), entry("org/tiny")]]
    _, env = given(launch("claude"))
    assert env["ANTHROPIC_MODEL"] == "org/tiny"


def test_codex_gets_flags_that_are_toml(launch, daemon):
    args, env = given(launch("codex", "--", "exec", "hi"))
    assert args[-2:] == ["exec", "hi"] and args[:-2:2] == ["-c"] * 5
    settings = tomllib.loads("\n".join(args[1:-2:2]))
    assert settings == {
        "model": "org/tiny",
        "model_provider": "omlxd",
        "model_context_window": 4096,
        "features": {"view_image": False},
        "model_providers": {
            "omlxd": {
                "name": "omlxd",
                "base_url": f"{daemon.url}/v1",
                "wire_api": "responses",
                "env_key": "OMLXD_API_KEY",
                "model_catalog_url": f"{daemon.url}/v1/codex/models",
            }
        },
    }
    assert env["OMLXD_API_KEY"] == "omlxd"  # It asks for the catalog only where there is a key.


def test_codex_reads_the_key_from_its_variable(launch, daemon):
    daemon.key = "secret1"
    args, env = given(launch("codex", OMLXD_API_KEY="secret1"))
    settings = tomllib.loads("\n".join(args[1::2]))
    assert settings["model_providers"]["omlxd"]["env_key"] == "OMLXD_API_KEY"
    assert env["OMLXD_API_KEY"] == "secret1" and "secret1" not in " ".join(args)


def test_opencode(launch, daemon):
    args, env = given(launch("opencode", "--", "run", "hi"))
    assert args == ["run", "hi"]
    config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == "omlxd/org/tiny"
    provider = config["provider"]["omlxd"]
    assert provider["options"] == {"baseURL": f"{daemon.url}/v1", "apiKey": "omlxd"}
    assert provider["models"]["org/tiny"]["limit"] == {"context": 4096, "output": 1024}
    assert provider["models"]["org/tiny"]["attachment"] is True


@pytest.mark.parametrize(("more", "sees"), [({}, False), ({"input_modalities": ["text", "image"]}, True)])
def test_opencode_and_codex_know_what_the_model_reads(launch, daemon, more, sees):
    daemon.answers = [[entry(**more)]]
    _, env = given(launch("opencode"))
    model = json.loads(env["OPENCODE_CONFIG_CONTENT"])["provider"]["omlxd"]["models"]["org/tiny"]
    assert model["modalities"] == {"input": ["text", "pdf", *["image"] * sees], "output": ["text"]}
    args, _ = given(launch("codex"))
    assert ("features.view_image=false" in args) is not sees


VARIABLES = {
    "qwen-code": {"OPENAI_BASE_URL": "URL/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "org/tiny"},
    "goose": {
        **{"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": "org/tiny", "GOOSE_CONTEXT_LIMIT": "4096"},
        **{"OPENAI_HOST": "URL", "OPENAI_API_KEY": "k"},
    },
    "aider": {
        **{"AIDER_MODEL": "openai/org/tiny", "AIDER_WEAK_MODEL": "openai/org/tiny"},
        **{"OPENAI_API_BASE": "URL/v1", "OPENAI_API_KEY": "k"},
    },
    "copilot": {
        **{"COPILOT_PROVIDER_BASE_URL": "URL/v1", "COPILOT_PROVIDER_API_KEY": "k", "COPILOT_OFFLINE": "true"},
        **{"COPILOT_MODEL": "org/tiny", "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "3072"},
    },
}


@pytest.mark.parametrize("agent", VARIABLES)
def test_agents_that_read_variables(launch, daemon, agent):
    daemon.key = "k"
    args, env = given(launch(agent, "--", "hi", OMLXD_API_KEY="k"))
    expected = {name: value.replace("URL", daemon.url) for name, value in VARIABLES[agent].items()}
    assert {name: env.get(name) for name in expected} == expected and args[-1] == "hi"
    flags = ["--auth-type", "openai"] if agent == "qwen-code" else []
    assert args[:-1] == [*flags, *(["--model", "org/tiny"] if flags else [])]


@pytest.mark.slow
def test_gemini_reads_how_it_signs_in_from_a_file(launch, daemon):
    assert "--save writes" in refused(launch("gemini"))
    _, env = given(launch("gemini", "--save"))
    assert (env["GOOGLE_GEMINI_BASE_URL"], env["GEMINI_MODEL"]) == (daemon.url, "org/tiny")
    file = Path(env["GEMINI_CLI_HOME"]) / ".gemini" / "settings.json"
    assert json.loads(file.read_text())["security"]["auth"]["selectedType"] == "gemini-api-key"


@pytest.mark.slow
def test_continue_reads_a_file_that_holds_no_key(launch, daemon):
    daemon.key = "k"
    _, env = given(launch("continue", "--save", OMLXD_API_KEY="k"))
    text = (Path(env["CONTINUE_GLOBAL_DIR"]) / "config.yaml").read_text()
    (model,) = json.loads(text)["models"]
    assert (model["apiBase"], model["model"]) == (f"{daemon.url}/v1", "org/tiny")
    assert model["apiKey"] == "${{ secrets.OMLXD_API_KEY }}" and env["OMLXD_API_KEY"] == "k"
    assert model["defaultCompletionOptions"]["contextLength"] == 4096


def test_crush_reads_a_file_that_is_written_when_asked_for(launch, daemon, tmp_path):
    assert "--save writes" in refused(launch("crush")) and not (tmp_path / ".omlxd").exists()
    _, env = given(launch("crush", "--save"))
    file = Path(env["CRUSH_GLOBAL_CONFIG"]) / "crush.json"
    assert file.is_relative_to(tmp_path / ".omlxd" / "launch") and env["OMLXD_API_KEY"] == "omlxd"
    config = json.loads(file.read_text())
    provider = config["providers"]["omlxd"]
    assert provider["base_url"] == f"{daemon.url}/v1" and provider["api_key"] == "$OMLXD_API_KEY"
    assert provider["models"][0]["context_window"] == 4096
    assert config["models"]["large"] == {"provider": "omlxd", "model": "org/tiny"}
    given(launch("crush", "--model", "other"))  # From now on it needs no flag.
    assert json.loads(file.read_text())["models"]["large"]["model"] == "org/other"


def test_a_model_that_answers_no_prompts_is_refused(launch, daemon):
    daemon.answers = [[entry("org/bert", kind="embedding"), entry()]]
    assert "org/bert answers no prompts" in refused(launch("aider", "--model", "bert"))


def test_pi_reads_a_file_too(launch, daemon):
    assert "--save writes" in refused(launch("pi"))
    args, env = given(launch("pi", "--save", "--", "-p", "hi"))
    assert args == ["--provider", "omlxd", "--model", "org/tiny", "-p", "hi"]
    config = json.loads((Path(env["PI_CODING_AGENT_DIR"]) / "models.json").read_text())
    provider = config["providers"]["omlxd"]
    assert provider["baseUrl"] == f"{daemon.url}/v1" and provider["apiKey"] == "$OMLXD_API_KEY"
    assert provider["models"] == [
        {"id": "org/tiny", "input": ["text"], "contextWindow": 4096, "maxTokens": 1024}
    ]


def test_the_list_says_what_is_installed(launch, tmp_path):
    lines = launch("--list").stdout.splitlines()
    assert len(lines) == 11 and f"qwen-code  {tmp_path / 'bin' / 'qwen'}" in lines
    (tmp_path / "bin" / "goose").unlink()
    assert any(
        line.startswith("goose      not installed: brew") for line in launch("--list").stdout.splitlines()
    )
    assert "Say which agent" in refused(launch(), 2)


@pytest.mark.slow
def test_no_file_is_written(launch, tmp_path):
    for agent in ("claude", "codex", "opencode", *VARIABLES):
        given(launch(agent))
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_proxy_does_not_stand_before_the_loopback(launch):
    _, env = given(launch("claude", HTTP_PROXY="http://127.0.0.1:9", NO_PROXY="corp"))
    assert env["NO_PROXY"] == "corp,127.0.0.1" and env["no_proxy"] == "127.0.0.1"


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_print_env_does_in_a_shell_what_the_command_does(launch, tmp_path, agent):
    args, env = given(launch(agent, "--", "say", "it's", ANTHROPIC_API_KEY="sk", OMLXD_API_KEY="a$b'c"))
    done = launch(agent, "--print-env", "--", "say", "it's", OMLXD_API_KEY="a$b'c")
    assert done.returncode == 0 and done.stderr.count("\n") == 1  # Of the small context.
    whole = {"PATH": str(tmp_path / "bin"), "ANTHROPIC_API_KEY": "sk"}
    program = f"{done.stdout}\n{agent}"
    shell = subprocess.run(["/bin/sh", "-c", program], env=whole, capture_output=True, text=True)
    again, environ = given(shell)
    assert again == args
    ours = ("ANTHROPIC", "CLAUDE", "OPENCODE")
    assert {name: value for name, value in env.items() if name.startswith(ours)} == {
        name: value for name, value in environ.items() if name.startswith(ours)
    }
    assert ("ANTHROPIC_API_KEY" in environ) == (agent != "claude")
    if agent == "codex":
        assert environ["OMLXD_API_KEY"] == "a$b'c"


def test_print_env_needs_no_program(launch, daemon):
    done = launch("claude", "--print-env", PATH="/nowhere")
    assert done.returncode == 0
    assert f"export ANTHROPIC_BASE_URL={daemon.url}\n" in done.stdout


def test_it_waits_while_the_model_loads(launch, daemon):
    daemon.answers.insert(0, [entry(context=None, state="loading")])
    done = launch("claude")
    assert given(done)[1]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert done.stderr.startswith("omlxd: waiting for org/tiny to load\n")


def test_a_context_that_nobody_knows_is_left_out(launch, daemon):
    daemon.answers = [[entry(context=None, state="failed")]]
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in given(launch("claude"))[1]
    assert "model_context_window" not in " ".join(given(launch("codex"))[0])


def refused(done, status=1):
    assert done.returncode == status and done.stdout == ""
    assert done.stderr.startswith("omlxd: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.slow
def test_what_can_not_be_is_one_sentence(launch, daemon):
    assert "start the daemon with `omlxd serve`" in refused(launch("claude", OMLXD_PORT="1"))
    assert "`omlxd serve`" in refused(launch("codex", "--print-env", "--url", "http://127.0.0.1:1"))
    assert "npm install -g @anthropic-ai/claude-code` on Node 22 or newer" in refused(
        launch("claude", PATH="/nowhere")
    )
    assert "npm install -g @openai/codex" in refused(launch("codex", PATH="/nowhere"))
    assert "npm install -g opencode-ai" in refused(launch("opencode", PATH="/nowhere"))
    assert "the models are: org/tiny, org/other" in refused(launch("claude", "--model", "gpt"))
    daemon.answers = [[]]
    assert "serves no model" in refused(launch("claude"))
    daemon.answers = [b"<html>"]
    assert "not as omlxd does" in refused(launch("claude"))
    assert "OMLXD_API_KEY" in refused(launch("claude", "--url", daemon.url, OMLXD_API_KEY="a\nb"))
    daemon.key = "k"
    assert "set OMLXD_API_KEY" in refused(launch("claude"))
    assert "the key in OMLXD_API_KEY: it is wrong" in refused(launch("claude", OMLXD_API_KEY="other"))


@pytest.mark.parametrize(
    ("context", "warned"), [(8192, True), (16_384, True), (32_768, False), (None, False)]
)
def test_a_context_too_small_for_the_agent_is_told_and_it_starts_all_the_same(
    launch, daemon, context, warned
):
    daemon.answers = [[entry(context=context)]]
    done = launch("claude")
    assert done.returncode == 7 and ("begins with about 20000" in done.stderr) == warned
    assert (f"context of org/tiny is {context} tokens" in done.stderr) == warned


def test_flags_that_make_no_sense(launch):
    assert "vim" in refused(launch("vim"), 2)
    assert "go after --" in refused(launch("claude", "-p", "hi"), 2)
    assert "--url" in refused(launch("claude", "--url", "example"), 2)
    assert "--url" in refused(launch("claude", "--url", "http://127.0.0.1:x"), 2)
    assert "--url" in refused(launch("claude", OMLXD_PORT="0"), 2)


def test_help_tells_of_it(launch):
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", "--help"],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    assert "launch" in done.stdout
    assert "--print-env" in launch("claude", "--help").stdout
