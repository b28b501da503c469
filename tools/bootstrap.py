"""From a fresh checkout to a running daemon, with nothing but a Python.

    python3 tools/bootstrap.py serve [flags of `omlxd serve`]
    python3 tools/bootstrap.py test [flags of pytest]
    python3 tools/bootstrap.py --cuda serve          (Linux with an NVIDIA GPU)

Makes `.venv` beside this checkout's pyproject.toml, installs omlxd into it once (again when
pyproject.toml changes), and becomes the program that was asked for. Standard library only, and
written so that an old Python can read it far enough to be refused with a sentence.
"""

import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import select
import shutil
import subprocess
import sys
import sysconfig

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "omlxd-installed.json")
"""Written last: an install that was interrupted has none, and is done again."""
OLDEST = (3, 11)
UV_PYTHONS = "~/.local/share/uv/python/cpython-3.1[1-9].*/bin"
VISION = "mlx-vlm==0.7.10"
"""Without its dependencies: a web server, training and audio, 700 MB. What images need is omlxd[vision]."""
USUAL, WIDTH = 60, 24
"""Packages of a first install, about; signs of its bar."""
CONTAMINANTS = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
    "__PYVENV_LAUNCHER__",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
)
"""Variables that make a Python import or install somebody else's packages."""


def main(argv):
    cuda = "--cuda" in argv
    argv = [word for word in argv if word != "--cuda"]
    if not argv or argv[0] not in ("serve", "test"):
        print(__doc__.strip())
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    verb, rest = argv[0], argv[1:]
    environ = clean_environment(dict(os.environ))
    if sys.version_info < OLDEST:
        become_newer_python(environ)
    problem = wrong_python()
    if problem:
        refuse(problem)
    if cuda and sys.platform != "linux":
        refuse("--cuda is for Linux with an NVIDIA GPU; leave it out here.")
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as lock:
        # Two of these at once would install into each other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = {
            "root": ROOT,
            "digest": hashlib.sha256(lock.read()).hexdigest(),
            "cuda": cuda,
            "test": verb == "test",
            "vision": VISION,
        }
        make_venv(environ)
        if not is_installed(wanted):
            install(wanted, environ)
    if verb == "serve":
        module = ["-m", "omlxd", "serve"]
        environ["OMLXD_FETCH_MODEL"] = "yes"  # Without --model; `omlxd serve` says so and falls back.
    else:
        module = ["-m", "pytest"]
        os.chdir(ROOT)
    os.execve(PYTHON, [PYTHON, *module, *rest], environ)


def say(text):
    print("bootstrap: " + text, file=sys.stderr, flush=True)


def refuse(sentence):
    say(sentence)
    sys.exit(1)


# --------------------------------------------------------------------------- which Python


def clean_environment(environ):
    """`environ` without what would mix other packages into the virtual environment."""
    dropped = [name for name in CONTAMINANTS if environ.pop(name, None)]
    conda = environ.get("CONDA_PREFIX")
    for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"):
        places = [place for place in environ.get(name, "").split(os.pathsep) if place]
        kept = [place for place in places if not (conda and place.startswith(conda))]
        if kept != places:
            dropped.append(name + " (conda's part)")
            environ[name] = os.pathsep.join(kept)
    if dropped:
        say("ignoring " + ", ".join(dropped) + ": they would mix other packages into .venv")
    environ["PYTHONNOUSERSITE"] = "1"
    return environ


def wrong_python():
    """Why this Python can't run omlxd, in a sentence that says what to do; "" if it can."""
    if platform.python_implementation() != "CPython":
        return f"MLX has no wheels for {platform.python_implementation()}; use CPython 3.11 or newer."
    if sys.maxsize <= 2**32:
        return "this Python is a 32-bit one; install a 64-bit Python 3.11 or newer."
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this is a free-threaded Python, for which there are no wheels; use the ordinary build."
    if sys.platform == "darwin":
        if platform.machine() != "arm64" and apple_silicon():
            return (
                "this Python is built for Intel and runs under Rosetta, where MLX can't; "
                "use an arm64 one: `brew install python@3.13` in /opt/homebrew, or python.org's."
            )
        if platform.machine() != "arm64":
            return "MLX needs a Mac with Apple silicon; this one has an Intel processor."
    elif sys.platform == "linux":
        if not platform.libc_ver()[0].startswith("glibc"):
            return "MLX has no wheels for musl (Alpine); use a distribution with glibc, such as Debian."
        if platform.machine() not in ("x86_64", "aarch64"):
            return f"MLX has no wheels for {platform.machine()}."
    else:
        return f"omlxd runs on macOS and Linux; this is {sys.platform}."
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "this Python lacks venv; on Debian and Ubuntu: `apt install python3-venv`."
    return ""


def apple_silicon():
    try:
        said = subprocess.run(["sysctl", "-n", "hw.optional.arm64"], stdout=subprocess.PIPE, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return said.stdout.strip() == b"1"


def become_newer_python(environ):
    """Run this again under a Python that is new enough, or refuse. macOS ships an old one."""
    folders = [
        *environ.get("PATH", "").split(os.pathsep),
        "/opt/homebrew/bin",
        "/usr/local/bin",
        *glob.glob("/Library/Frameworks/Python.framework/Versions/3.1[1-9]/bin"),
        os.path.expanduser("~/.local/bin"),
        # A `+` in the name of one of uv's is another build, as one without the GIL.
        *[place for place in glob.glob(os.path.expanduser(UV_PYTHONS)) if "+" not in place],
    ]
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for minor in (13, 12, 11, 14):
        path = shutil.which(f"python3.{minor}", path=os.pathsep.join(folders))
        # A version manager's shim may be there without the version that it is named after.
        if path and subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL, env=environ) == 0:
            say(f"this Python is {found}; going on with {path}")
            os.execve(path, [path, os.path.abspath(__file__), *sys.argv[1:]], environ)
    refuse(
        f"this Python is {found} and omlxd needs 3.11 or newer; install one "
        "(macOS: `brew install python@3.13`; Debian and Ubuntu: `apt install python3 python3-venv`) "
        "and run it again."
    )


# --------------------------------------------------------------------------- the virtual environment


def make_venv(environ):
    """`.venv` with a working Python and pip, in this place; one that isn't is made anew."""
    if os.path.lexists(VENV):
        problem = broken_venv(environ)
        if not problem:
            return
        say("making .venv again: " + problem)
        shutil.rmtree(VENV)
    # Inside another virtual environment, the Python that it was made from.
    base = getattr(sys, "_base_executable", None) or sys.executable
    if os.path.isdir(os.path.join(sys.base_prefix, "conda-meta")):
        say("this Python is conda's; .venv uses it but none of its packages")
    if subprocess.call([base, "-m", "venv", VENV], env=environ):
        shutil.rmtree(VENV, ignore_errors=True)
        refuse(f"{base} can't make a virtual environment in {VENV}; its reason is above.")


def broken_venv(environ):
    """Why `.venv` can't be used, or ""."""
    stamp = read_stamp()
    if stamp and stamp.get("root") != ROOT:
        return f"it was made in another place ({stamp.get('root')})"
    test = f"import sys, pip; assert sys.version_info >= {OLDEST} and sys.prefix != sys.base_prefix"
    try:
        done = subprocess.run([PYTHON, "-c", test], env=environ, stderr=subprocess.DEVNULL)
    except OSError:
        return "the Python that it was made from is gone"
    return "its Python or its pip doesn't work" if done.returncode else ""


def read_stamp():
    try:
        with open(STAMP) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def is_installed(wanted):
    """Whether the last finished install covers `wanted`; the test extra only adds."""
    stamp = read_stamp()
    if not stamp or any(stamp.get(key) != wanted[key] for key in ("root", "digest", "cuda", "vision")):
        return False
    return stamp.get("test") or not wanted["test"]


def install(wanted, environ):
    stamp = read_stamp()
    wanted = dict(wanted, test=wanted["test"] or bool(stamp and stamp.get("test")))
    if os.path.exists(STAMP):
        os.remove(STAMP)
    extras = [name for name in ("cuda", "test", "vision") if wanted[name]]
    target = f"{ROOT}[{','.join(extras)}]"
    say("installing omlxd into .venv, once; this takes a minute or so")
    pip(environ, "install", "--editable", target)
    pip(environ, "install", "--no-deps", VISION)
    if wanted["cuda"]:
        use_cuda(environ)
    elif stamp and stamp.get("cuda"):
        pip(environ, "uninstall", "--yes", "mlx-cuda-13", "mlx-cuda-12")
        reinstall(environ, "mlx-cpu")
    part = STAMP + ".part"
    with open(part, "w") as file:
        json.dump(wanted, file)
    os.replace(part, STAMP)


def use_cuda(environ):
    """mlx-cpu and mlx-cuda hold files of the same names: the one that is wanted must come last."""
    pip(environ, "uninstall", "--yes", "mlx-cpu")
    reinstall(environ, "mlx-cuda-13")


def reinstall(environ, name):
    """`name` again, of the version that mlx has."""
    code = "from importlib.metadata import version; print(version('mlx'))"
    version = subprocess.check_output([PYTHON, "-c", code], env=environ).decode().strip()
    pip(environ, "install", "--force-reinstall", "--no-deps", f"{name}=={version}")


class Bar:
    """How far an install is, by pip's own lines and by what is in .venv: a bar on a terminal, else lines."""

    def __init__(self, stream=sys.stderr):
        self._stream = stream
        self._collected = self._fetched = self._wanted = 0
        self._before = installed_count()
        self._words, self._shown = "", set()

    def line(self, text):
        """A line that pip wrote."""
        found = re.match(r"\s*(Collecting|Downloading|Using cached) (\S+)(?: (\(.*?\)))?", text)
        if text.startswith("Installing collected packages:"):
            self._wanted = text.count(",") + 1
        elif found and found.group(1) == "Collecting":
            self._collected += 1
            self._words = "finding " + re.split(r"[<>=!~;\[]", found.group(2))[0]
        elif found and not found.group(2).endswith(".metadata"):
            self._fetched += 1
            name = found.group(2).rpartition("/")[2].partition("-")[0]
            self._words = "fetching " + name + " " + (found.group(3) or "")

    @property
    def part(self):
        """From 0 to 1. Pip finds and fetches at first, which takes the longer."""
        if not self._wanted:
            return 0.7 * min(1.0, (self._collected + self._fetched) / (2 * max(USUAL, self._collected)))
        return 0.7 + 0.3 * min(1.0, (installed_count() - self._before) / self._wanted)

    def draw(self):
        words = f"unpacking {self._wanted} packages" if self._wanted else self._words
        if self._stream.isatty():
            filled = round(WIDTH * self.part)
            bar = "#" * filled + "." * (WIDTH - filled)
            text = f"bootstrap: [{bar}] {int(100 * self.part):3d} % {words or 'preparing'}"
            self._stream.write("\r" + text[: shutil.get_terminal_size().columns - 1] + "\033[K")
        elif words and words.split()[0] not in self._shown:  # Pip finds and fetches in turns.
            self._shown.add(words.split()[0])
            self._stream.write("bootstrap: " + words.split()[0] + " packages\n")
        self._stream.flush()

    def end(self):
        if self._stream.isatty():
            self._stream.write("\r\033[K")
            self._stream.flush()


def installed_count():
    """Packages in .venv."""
    return len(glob.glob(os.path.join(glob.escape(VENV), "lib", "python3*", "site-packages", "*.dist-info")))


def run_with_bar(command, environ, bar):
    """Run pip; returns its exit status, and its last lines where it failed. What it warns of goes on to the
    terminal."""
    last = []
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as process:
        left = b""
        while True:
            bar.draw()
            if not select.select([process.stdout], [], [], 0.2)[0]:
                continue
            read = os.read(process.stdout.fileno(), 65536)
            if not read:
                break
            *lines, left = (left + read).split(b"\n")
            for line in lines:
                bar.line(line.decode(errors="replace"))
                last = [*last[-5:], line.decode(errors="replace")]
    bar.end()
    if process.returncode:
        print("\n".join(last), file=sys.stderr)
    return process.returncode


def pip(environ, *arguments):
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if arguments[0] == "install":
        failed = run_with_bar([*command, *arguments, "--progress-bar", "off"], environ, Bar())
    else:
        failed = subprocess.call([*command, "--quiet", *arguments], env=environ)
    if failed:
        refuse(
            "pip could not install omlxd; its reason is above. "
            "If the network failed, run this again: it goes on where it stopped."
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
