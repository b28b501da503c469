"""Settings: where each value comes from, and what is refused by which name."""

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from omlxd.cli import main as cli
from omlxd.cli.main import main
from omlxd.common.units import disk_total, total_ram
from omlxd.config import (
    OPTIONS,
    ModelSettings,
    Settings,
    has_ssd_cache,
    is_loopback,
    load_settings,
    ssd_cap,
    unknown_variables,
    warnings_of,
)
from omlxd.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]


def settings(
    flags: dict[str, str] | None = None, env: dict[str, str] | None = None, home: Path | None = None
):
    """Settings with a base path that holds no file, unless `flags` or `env` say otherwise."""
    flags = dict(flags or {})
    if home is not None:
        flags.setdefault("base_path", str(home))
    return load_settings(flags, env or {})


def write(folder: Path, text: str) -> Path:
    path = folder / "omlxd.toml"
    path.write_text(text)
    return path


def refused(flags: dict[str, str] | None = None, env: dict[str, str] | None = None, home: Path | None = None):
    with pytest.raises(ConfigError) as caught:
        settings(flags, env, home)
    return caught.value


def values(given: Settings) -> dict[str, object]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(given).items()
        if name not in ("sources", "config")
    }


def test_defaults(tmp_path: Path):
    got = settings(home=tmp_path)
    assert (got.model, got.host, got.port, got.api_key) == ("", "127.0.0.1", 8000, "")
    assert got.paged_ssd_cache_dir == tmp_path / "cache"
    assert got.cold_cache_bytes is None
    assert got.hot_cache_bytes is None
    assert (got.initial_cache_blocks, got.block_size, got.max_concurrent_requests) == (256, 64, None)
    assert got.no_cache is False and got.seed is None and got.log_level == "info"
    assert got.sources["port"] == "default" and got.sources["base_path"] == "--base-path"


def test_the_example_file_equals_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    from_file = load_settings({"config": str(REPO / "config" / "omlxd.toml")}, {})
    assert values(from_file) == values(load_settings({}, {}))
    assert "line" in from_file.sources["port"]


def test_the_example_file_and_the_readme_name_every_option():
    example, readme = (
        (REPO / "config" / "omlxd.toml").read_text(),
        (REPO / "config" / "README.md").read_text(),
    )
    for option in OPTIONS:
        assert option.flag.removeprefix("--") + " =" in example
        assert f"`{option.flag}" in readme


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path):
    write(tmp_path, "[serve]\nport = 1\nblock_size = 32\nmax-concurrent-requests = 3\n")
    got = settings({"port": "3"}, {"OMLXD_PORT": "2", "OMLXD_BLOCK_SIZE": "128"}, tmp_path)
    assert (got.port, got.block_size, got.max_concurrent_requests, got.log_level) == (3, 128, 3, "info")
    assert got.sources["port"] == "--port"
    assert got.sources["block_size"] == "OMLXD_BLOCK_SIZE"
    assert got.sources["max_concurrent_requests"].endswith("omlxd.toml line 4 (max-concurrent-requests)")


def test_no_variable_of_ours_is_warned_of():
    own = re.compile(r"""["'](OMLXD_[A-Z_]+)["']""")
    files = [path for room in ("omlxd", "tests", "tools") for path in (REPO / room).rglob("*.py")]
    named = {name for path in files if path != Path(__file__) for name in own.findall(path.read_text())}
    environ = dict.fromkeys(named, "x") | {"PATH": "x", "OMLXD_PORT": "1", "OMLXD_SIZE": ""}
    warned = [sentence.partition(" ")[0] for sentence in unknown_variables(environ)]
    assert "OMLXD_ENGINE_COMMAND" in named and warned == ["OMLXD_PRT"]  # It is tests/cli/test_status.py's.
    assert unknown_variables({"OMLXD_QQQQQQ": "1"}) == [
        "OMLXD_QQQQQQ is no variable of omlxd; it is ignored."
    ]
    assert unknown_variables({"OMLXD_DRAFT_MODEL": "1"}) == [
        'OMLXD_DRAFT_MODEL is no variable of omlxd (it stands under [models."NAME"] of a settings file); '
        "it is ignored."
    ]


def test_what_is_no_toml_is_said_with_its_line(tmp_path: Path):
    for text, said in (
        (b"[serve]\nport = 1\nport = 2\n", " line 3: port stands there twice."),
        (b"[models.a]\naliases = []\naliases = [\n]\n", " line 4: a key stands there twice."),
        (b"[serve]\nno-cache = true\nno-cache = true\n", " line 3: no-cache stands there twice."),
        (b"[serve]\n[serve]\n", " line 2: [serve] stands there twice."),
        (b"[serve]\nport =\n", " line 2: Invalid value."),
        (
            b"[serve]\n\nkv-bits = 4\nspeculation = off # slow\n",
            ' line 4: a word needs quotes: speculation = "off".',
        ),
        (b"[serve]\nbase-path = ~/x\n", ' line 2: a word needs quotes: base-path = "~/x".'),
        (b"[serve]\nmemory-limit = 60%", ' line 2: a word needs quotes: memory-limit = "60%".'),
        (b"[serve]\nspeculation = false\n", ' line 2 (speculation): false is none of "auto", "off".'),
        (b"[serve]\n# \xff\n", " line 2: the text is not UTF-8."),
    ):
        path = tmp_path / "omlxd.toml"
        path.write_bytes(text)
        assert refused(home=tmp_path).message == f"{path}{said}"


def test_config_by_variable_and_missing_files(tmp_path: Path):
    path = write(tmp_path, "[serve]\nport = 7\n")
    assert settings(env={"OMLXD_CONFIG": str(path)}).port == 7
    assert refused({"config": str(tmp_path / "gone.toml")}).message.startswith("--config: ")
    assert refused(env={"OMLXD_CONFIG": str(tmp_path)}).message.startswith("OMLXD_CONFIG: ")
    for nowhere in ("~nobody-here/x", "x" * 300):
        assert refused({"config": nowhere}).message.startswith("--config: there is no file ")
    assert "omlxd.toml can't be read: " in refused({"base_path": "x" * 300}).message


def test_sizes_and_percentages(tmp_path: Path):
    got = settings({"hot_cache_max_size": "25%", "paged_ssd_cache_max_size": "10%"}, home=tmp_path)
    assert got.hot_cache_bytes == total_ram() // 4
    assert got.cold_cache_bytes == disk_total(tmp_path) // 10
    assert settings({"hot_cache_max_size": "0"}, home=tmp_path).hot_cache_bytes == 0


def test_a_cap_that_was_set_is_kept_and_another_follows_the_disk(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("omlxd.config.settings.disk_room", lambda folder: 30 * 10**9)
    told = settings({"paged_ssd_cache_max_size": "90GB"}, home=tmp_path)
    assert ssd_cap(told, 0) == ssd_cap(told, 10**10) == 90 * 10**9 and has_ssd_cache(told)
    for none in ({"paged_ssd_cache_max_size": "0"}, {"no_cache": "true"}):
        assert not has_ssd_cache(settings(none, home=tmp_path))
    auto = settings(home=tmp_path)
    assert auto.cold_cache_bytes is None and has_ssd_cache(auto)
    assert (ssd_cap(auto, 0), ssd_cap(auto, 10**10)) == (15 * 10**9, 20 * 10**9)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hot_cache_max_size", "lots"),
        ("hot_cache_max_size", "900TB"),
        ("hot_cache_max_size", "120%"),
        ("hot_cache_max_size", "8"),
        ("hot_cache_max_size", "0.2"),
        ("paged_ssd_cache_max_size", "-1GB"),
        ("paged_ssd_cache_max_size", "much"),
        ("port", "70000"),
        ("port", "http"),
        ("port", "-1"),
        ("initial_cache_blocks", "0"),
        ("block_size", "100"),
        ("kv_bits", "16"),
        ("kv_group_size", "48"),
        ("block_size", "8"),
        ("max_concurrent_requests", "0"),
        ("seed", "-1"),
        ("seed", "anything"),
        ("log_level", "loud"),
        ("host", ""),
        ("host", "a b"),
        ("api_key", ""),
        ("api_key", "two words"),
        ("base_path", ""),
        ("base_path", "~nobody-here/x"),
        ("model_dir", "~nobody-here/x"),
        ("model_dir", "/" + "x" * 300),
        ("memory_limit", "9" * 400 + ".5GB"),
        ("ssd_cache_ttl", "-5"),
        ("stall_timeout", "-5s"),
        ("model_ttl", "-1"),
    ],
)
def test_nonsense_is_refused_by_flag_variable_and_line(name: str, text: str, tmp_path: Path):
    flag, variable = "--" + name.replace("_", "-"), "OMLXD_" + name.upper()
    assert refused({"base_path": str(tmp_path), name: text}).message.startswith(flag + ": ")
    if text:
        assert refused(
            {} if name == "base_path" else {"base_path": str(tmp_path)}, {variable: text}
        ).message.startswith(variable + ": ")
    path = write(tmp_path, f'[serve]\n\n{name} = "{text}"\n')
    message = refused({"config": str(path)}).message
    assert message.startswith(f"{path} line 3 ({name}): ")
    assert name != "api_key" or not text or text not in message


def test_what_is_overridden_is_checked_as_well(tmp_path: Path, capsys):
    path = write(tmp_path, '[serve]\nport = "banana"\nblock-size = 64\nmodel-dir = "/nowhere/at-all"\n')
    assert "line 2 (port)" in refused({"model_dir": ""}, home=tmp_path).message
    got = settings({"port": "3", "model_dir": "", "block_size": "32"}, {"OMLXD_PORT": "-1"}, tmp_path)
    assert got.port == 3 and got.overridden == (
        "OMLXD_PORT: '-1' is no whole number from 0 to 65535; --port overrides it.",
        f"{path} line 2 (port): 'banana' is no whole number from 0 to 65535; --port overrides it.",
        f"{path} line 4 (model-dir): there is no folder /nowhere/at-all; --model-dir overrides it.",
    )
    assert main(["config", "show", "--base-path", str(tmp_path), "--port", "3", "--model-dir", ""]) == 0
    assert capsys.readouterr().err.count("overrides it.\n") == 2
    write(tmp_path, '[serve]\napi-key = "two words"\n')
    (said,) = settings({"api_key": "k"}, home=tmp_path).overridden
    assert "line 2 (api-key)" in said and "two words" not in said
    assert settings({"port": "3"}, {"OMLXD_PORT": "2"}).overridden == ()


def test_a_number_that_may_be_a_word(tmp_path: Path):
    message = refused({"max_concurrent_requests": "AUTO2"}, home=tmp_path).message
    assert message.endswith("'AUTO2' is neither auto nor a whole number from 1 to 1024.")
    assert "neither none nor a whole number" in refused({"max_thinking_tokens": "x"}, home=tmp_path).message


def test_a_flag_that_a_models_own_setting_overrides_is_told(tmp_path: Path):
    text = (
        '[serve]\nkv-bits = 4\n[models.a]\nmetal-kernels = "auto"\nkv-bits = 8\nhealing = true\nttl = "0"\n'
    )
    path = write(tmp_path, text)
    got = settings({"metal_kernels": "off", "no_healing": "true", "model_ttl": "0"}, home=tmp_path)
    assert warnings_of(got, {}) == [
        f"{flag} does not hold for a: its own setting wins ({path} line {line} ({key}))."
        for flag, line, key in (
            ("--metal-kernels", 4, "metal-kernels"),
            ("--no-healing", 6, "healing"),
        )
    ]
    assert warnings_of(settings({"metal_kernels": "auto"}, home=tmp_path), {}) == []


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("[serve]\nporrt = 1\n", "line 2 (porrt)", "did you mean port?"),
        ("[serve]\nhot_cache_size = 1\n", "line 2", "hot-cache-max-size"),
        ("[serve]\ndraft-model = 1\n", "line 2", '(it stands under [models."NAME"] of a settings file)'),
        ("[serve]\ntop_p = 1\n", "line 2", '(it stands under [defaults] or [models."NAME"] of a '),
        ('[defaults]\nspeculation = "off"\n', "line 2", 'under [serve] or [models."NAME"] of a '),
        ("[models.a]\nhot-cache-max-size = 0\n", "line 2", "(it stands under [serve] of a "),
        ("port = 1\n", "line 1 (port)", "put [serve] before it"),
        ('[model."a/b"]\nttl = 1\n', "line 1 (model)", "did you mean models?"),
        ("[server]\nport = 1\n", "line 1", "did you mean serve?"),
        ("[serve]\nport = 1\nport = 2\n", "line 3", ""),
        ("[serve]\nno_cache = true\nno-cache = true\n", "line 3", "twice"),
        ("[serve]\nport = [1]\n", "line 2", "one value"),
        ("[serve]\nport = true\n", "line 2", "no whole number"),
        ("[serve\n", "line 1", ""),
        ("serve = 3\n", "line 1", ""),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text: str, line: str, hint: str, tmp_path: Path):
    path = write(tmp_path, text)
    message = refused(home=tmp_path).message
    assert str(path) in message and line in message and hint in message


def test_all_mistakes_of_a_file_are_told_in_its_order(tmp_path: Path):
    path = write(
        tmp_path,
        "[serve]\nport = -1\nkv-bits = 5\nnonesuch = 1\n[defaults]\ntop-p = 7\n"
        '[models.a]\nttl = "x"\nwhat = 2\n',
    )
    status, said = run(
        "config", "show", "--config", str(path), "--base-path", str(tmp_path), "--block-size", "x"
    )
    assert status == 2
    assert re.findall(r"(?m)^omlxd: (--block-size|\S+ line \d+) ?[:(]", said) == [
        "--block-size",
        *(f"{path} line {number}" for number in (2, 3, 4, 6, 8, 9)),
    ]
    write(tmp_path, "[serve]\n" + "".join(f"x{number} = 1\n" for number in range(13)))
    assert refused(home=tmp_path).message.splitlines()[9:] == [
        f"{path} line 11 (x9): 'x9' is no setting.",
        "And 3 more mistakes.",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("temperature = 9", "9 is no number from 0 to 2."),
        ("top-p = 0", "0 is no number above 0 to 1."),
        ("min-p = 1", "1 is no number from 0 to below 1."),
        ("repetition-penalty = 11", "11 is no number from 0.01 to 10."),
        ('thinking = "no"', "'no' is neither true nor false."),
        ('pin = "true"', "'true' is neither true nor false."),
    ],
)
def test_settings_of_a_model_have_the_bounds_of_requests_and_true_is_no_text(
    line: str, told: str, tmp_path: Path
):
    write(tmp_path, f"[models.a]\n{line}\n")
    assert refused(home=tmp_path).message.endswith(f"): {told}")


@pytest.mark.parametrize("table", ["[serve]", '[models."a/b"]'])
def test_a_value_of_a_wrong_type_is_told_what_it_has_to_be(table: str, tmp_path: Path):
    names = [option.name for option in OPTIONS] if table == "[serve]" else ModelSettings.__struct_fields__
    for name in names:
        told = 0
        for value in ("5", "true", '""', "[5]", "1979-05-27"):
            write(tmp_path, f"{table}\n{name} = {value}\n")
            with contextlib.suppress(ConfigError):
                settings(home=tmp_path)
                continue
            message = refused(home=tmp_path).message.partition("): ")[2].removesuffix(".")
            told += 1
            assert len(message.split()) > 3 and not message.endswith(" is"), (name, value, message)
        assert told, name


def test_only_loopback_goes_without_a_key(tmp_path: Path):
    for host in ("0.0.0.0", "::", "192.168.1.5", "myhost.lan", "[::1]x"):
        flags = {"host": host}
        assert refused(flags, home=tmp_path).message.startswith("--host: ")
    assert settings({"host": "0.0.0.0", "api_key": "k"}, home=tmp_path).host == "0.0.0.0"
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))


def test_the_key_is_never_shown(tmp_path: Path):
    got = settings({"api_key": "s3cret"}, home=tmp_path)
    assert got.api_key == "s3cret" and "s3cret" not in repr(got)


def run(*argv: str) -> tuple[int, str]:
    """(exit status, standard error) of `omlxd argv`, in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        status = cli.main(argv)
    return status, err.getvalue()


def test_the_command_ends_with_2_and_one_sentence(tmp_path: Path):
    base = ("serve", "--base-path", str(tmp_path))
    for argv, words in (
        ((*base, "--port", "x"), "--port: 'x'"),
        ((*base, "--prot", "1"), "did you mean --port?"),
        ((*base, "--draft-model", "x"), '(it stands under [models."NAME"] of a settings file)'),
        ((*base, "--por", "1"), "did you mean --port?"),
        ((*base, "--port"), "expected one argument"),
        (("serv",), "There is no verb 'serv' (did you mean serve?)"),
    ):
        status, said = run(*argv)
        assert status == 2, argv
        assert words in said and said.startswith("omlxd: ") and said.count("\n") == 1, said


def test_help_and_version_exit_0_without_mlx():
    code = (
        "import sys; from omlxd.cli import main as cli\n"
        "for argv in (['--version'], ['serve', '--help']):\n"
        "    try: cli.main(argv)\n"
        "    except SystemExit as e: assert not e.code\n"
        "heavy = {'mlx', 'numpy', 'transformers', 'huggingface_hub', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("omlxd 0.") and "--paged-ssd-cache-dir" in done.stdout


def test_the_installed_command_is_there():
    if shutil.which("omlxd") is None:
        pytest.skip("run from a checkout that is not installed")
    done = subprocess.run(["omlxd", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("omlxd 0.")


def test_a_reader_that_has_seen_enough_is_no_error():
    shell = f"{sys.executable} -m omlxd config show | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=REPO)
    assert done.stdout.startswith("SETTING") and not done.stderr


def test_the_command_alone_shows_its_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: omlxd") and "serve a model over HTTP" in shown and "doctor" in shown
