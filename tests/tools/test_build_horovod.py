import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from accordion_hvd.tools import build_horovod as bh

ROOT = Path(__file__).resolve().parents[2]
BOTH = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}
MODULE = "accordion_hvd.tools.build_horovod"


def run_module(*arguments, **env):
    """Run `python -m accordion_hvd.tools.build_horovod` with PATH and caches of the test's own."""
    command = [sys.executable, "-m", MODULE, *map(str, arguments)]
    environment = {**os.environ, **{k: str(v) for k, v in env.items()}}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def write_wheel(path, names=("horovod/torch/mpi_lib_v2.so", "horovod/tensorflow/mpi_lib.so")):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, bytes(range(256)) * 40)
    return path


def old_parts():
    """Return the lines of Horovod's source that each part of the patch replaces, by file."""
    parts = {}
    for text in bh.PATCH.read_text().split("\n--- a/")[1:]:
        path, _, rest = text.partition("\n")
        lines = [line for line in rest.splitlines() if line[:1] in ("@", " ", "-")]
        for line in lines:
            if line.startswith("@@"):
                parts.setdefault(path, []).append("")
            else:
                parts[path][-1] += line[1:] + "\n"
    return parts


def stand_in_source(folder):
    """Write the lines of Horovod's source that the patch replaces, with other lines around them."""
    for path, parts in old_parts().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("# before\n" + "# between\n".join([*parts, ""]))
    return folder


def test_the_patch_is_found_from_every_folder(tmp_path, monkeypatch):
    """`make setup` runs the module by a path that is relative to the clone."""
    monkeypatch.chdir(ROOT)
    names = runpy.run_path("accordion_hvd/tools/build_horovod.py")
    monkeypatch.chdir(tmp_path)
    assert names["PATCH"].read_bytes() == bh.PATCH.read_bytes()


def apply_patch(source, log):
    bh._step("patching Horovod", ["patch", "-p1", "-i", str(bh.PATCH)], os.environ, log, source)


# --- the patch ---------------------------------------------------------------------------


def test_edits_change_what_they_should_and_nothing_else(tmp_path):
    source = stand_in_source(tmp_path / "source")
    before = {path: (source / path).read_text() for path in old_parts()}
    apply_patch(source, tmp_path / "log")
    text = (source / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in text and "STANDARD 14" not in text
    assert "$ORIGIN/../../../.." in text
    assert "STANDARD 17" in (source / "horovod/torch/CMakeLists.txt").read_text()
    path = "horovod/tensorflow/CMakeLists.txt"
    removed = set(before[path].splitlines()) - set((source / path).read_text().splitlines())
    assert len(removed) == 1 and "xla_mpi_ops.cc" in removed.pop()
    basics = (source / "horovod/common/basics.py").read_text()
    assert "import sys\n" in basics and "OPAL_PREFIX" in basics
    files = {path for path in source.rglob("*") if path.is_file() and path.suffix != ".orig"}
    assert files == {source / path for path in before}


@pytest.mark.parametrize("damage", [None, "set(CMAKE_CXX_STANDARD 14)\n" * 2])
def test_an_unknown_source_is_refused(tmp_path, damage):
    source = stand_in_source(tmp_path / "source")
    (source / "CMakeLists.txt").unlink()
    if damage:
        (source / "CMakeLists.txt").write_text(damage)
    with pytest.raises(bh.BuildError, match="patching Horovod failed"):
        apply_patch(source, tmp_path / "log")


def test_another_archive_is_refused(tmp_path):
    """pip refuses an archive of Horovod's name and version with another SHA-256."""
    folder = tmp_path / "horovod-0.28.1"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    (tmp_path / "work").mkdir()
    with pytest.raises(bh.BuildError, match=r"this is not Horovod 0\.28\.1's source"):
        bh.fetch_source(tmp_path / "work", env, tmp_path / "log")


# --- the key -----------------------------------------------------------------------------


def test_key_is_a_readable_file_name():
    key = bh.cache_key(BOTH, "openmpi4.1.8")
    for part in ("horovod0.28.1", "torch2.13.0+cpu", "tensorflow2.21.0", "openmpi4.1.8"):
        assert part in key
    assert f"cp{sys.version_info[0]}{sys.version_info[1]}" in key
    assert "/" not in bh.cache_key(BOTH, "openmpi4.1.4@/usr/bin/mpicxx")


def test_key_does_not_depend_on_order():
    assert bh.cache_key(BOTH, None) == bh.cache_key(dict(reversed(BOTH.items())), None)


def test_key_tells_apart_what_makes_another_wheel(tmp_path, monkeypatch):
    keys = {
        bh.cache_key(BOTH, "openmpi4.1.8"),
        bh.cache_key(BOTH, None),
        bh.cache_key(BOTH, "openmpi4.1.8@/usr/bin/mpicxx"),
        bh.cache_key({"torch": "2.13.0+cpu"}, "openmpi4.1.8"),
        bh.cache_key({**BOTH, "torch": "2.12.0+cpu"}, "openmpi4.1.8"),
        bh.cache_key(BOTH, "openmpi4.1.8", {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
    }
    monkeypatch.setattr(bh, "RECIPE", bh.RECIPE + 1)
    keys.add(bh.cache_key(BOTH, "openmpi4.1.8"))
    monkeypatch.setattr(bh, "_cpu_flags", lambda: ["sse"])
    keys.add(bh.cache_key(BOTH, "openmpi4.1.8"))
    (tmp_path / "patch").write_bytes(bh.PATCH.read_bytes() + b"\n")
    monkeypatch.setattr(bh, "PATCH", tmp_path / "patch")
    keys.add(bh.cache_key(BOTH, "openmpi4.1.8"))
    assert len(keys) == 9


def test_build_environment_is_not_that_of_a_make_around_it(monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", " -j8 --jobserver-auth=3,4")
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("HOROVOD_WITHOUT_PYTORCH", "1")
    env = bh.build_environment({"torch": "2"}, mpi=False)
    assert env["MAKEFLAGS"] == "-j2" and "MAKELEVEL" not in env
    assert env["HOROVOD_WITH_PYTORCH"] == "1" and "HOROVOD_WITHOUT_PYTORCH" not in env
    assert env["HOROVOD_WITHOUT_TENSORFLOW"] == env["HOROVOD_WITHOUT_MPI"] == "1"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


# --- cached wheels -----------------------------------------------------------------------


def test_good_wheel_is_found(tmp_path):
    wheel = write_wheel(tmp_path / "horovod-0.28.1-any.whl")
    assert bh.cached_wheel(tmp_path, BOTH) == wheel


def test_damaged_wheels_are_deleted(tmp_path, capsys):
    wheel = write_wheel(tmp_path / "horovod-0.28.1-any.whl")
    whole = wheel.read_bytes()
    flipped = bytearray(whole)
    flipped[500] ^= 1
    for damaged in (whole[: len(whole) // 2], b"", bytes(flipped)):
        wheel.write_bytes(damaged)
        assert bh.cached_wheel(tmp_path, BOTH) is None
        assert not wheel.exists()
        assert "is damaged; it is built again" in capsys.readouterr().out


def test_a_wheel_without_a_framework_is_not_good(tmp_path):
    wheel = write_wheel(tmp_path / "horovod-0.28.1-any.whl", ["horovod/torch/mpi_lib_v2.so"])
    assert bh.wheel_is_good(wheel, {"torch": "2.13.0"})
    assert not bh.wheel_is_good(wheel, BOTH)


def test_keeping_a_wheel_leaves_nothing_else(tmp_path):
    wheel = write_wheel(tmp_path / "built" / "horovod-0.28.1-any.whl")
    kept = bh._store(wheel, tmp_path / "cache")
    assert kept.read_bytes() == wheel.read_bytes()
    assert list((tmp_path / "cache").iterdir()) == [kept]


def test_a_full_disk_leaves_no_part_of_a_wheel(tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "built" / "horovod-0.28.1-any.whl")

    def fill(source, target):
        target.write_bytes(b"some of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(bh.BuildError, match="No space left on device"):
        bh._store(wheel, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_damaged_cached_wheel_is_built_again(tmp_path, monkeypatch):
    """`build` uses a cached wheel, and replaces a damaged one; a file stands in for compiling."""
    built = []

    def fake_build(folder, frameworks, env, log):
        built.append(folder)
        return write_wheel(folder / "horovod-0.28.1-any.whl")

    monkeypatch.setattr(bh, "framework_versions", lambda: BOTH)
    monkeypatch.setattr(bh, "check_tools", lambda env, frameworks: None)
    monkeypatch.setattr(bh, "build_wheel", fake_build)
    first = bh.build(tmp_path, wheel_only=True)
    assert bh.build(tmp_path, wheel_only=True) == first and len(built) == 1
    first.write_bytes(first.read_bytes()[:1000])
    assert bh.build(tmp_path, wheel_only=True) == first and len(built) == 2
    assert bh.wheel_is_good(first, BOTH)
    bh.build(tmp_path, force=True, wheel_only=True)
    assert len(built) == 3


def test_a_cached_wheel_that_does_not_load_is_built_again(tmp_path, monkeypatch, capsys):
    outcomes = [bh.BuildError("loading horovod.torch failed"), None]

    def install(wheel, frameworks, env, log):
        if error := outcomes.pop(0):
            raise error

    monkeypatch.setattr(bh, "framework_versions", lambda: BOTH)
    monkeypatch.setattr(bh, "check_tools", lambda env, frameworks: None)
    monkeypatch.setattr(bh, "install_wheel", install)
    monkeypatch.setattr(
        bh, "build_wheel", lambda folder, *_: write_wheel(folder / "horovod-0.28.1-any.whl")
    )
    bh.build(tmp_path, wheel_only=True)
    bh.build(tmp_path)
    assert outcomes == [] and "is built again" in capsys.readouterr().out


@pytest.mark.parametrize("before", ["# nothing set\n", "plm_rsh_agent = rsh\n"])
def test_open_mpi_is_told_once_to_do_without_ssh(tmp_path, monkeypatch, before):
    monkeypatch.setattr(bh, "_version", lambda name: "4.1.8")
    settings = tmp_path / "etc" / "openmpi-mca-params.conf"
    bh.prepare_open_mpi(tmp_path)  # nothing to do, nothing made
    assert not settings.exists()
    settings.parent.mkdir()
    settings.write_text(before)
    for _ in range(2):
        bh.prepare_open_mpi(tmp_path)
        lines = [line for line in settings.read_text().splitlines() if line[:3] == "plm"]
        assert lines == (before.splitlines() if "plm" in before else [lines[0]])


# --- one clear sentence ------------------------------------------------------------------


def one_line(done):
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


def command_folder(folder, *names):
    """Make a folder with nothing but these commands, to be used as PATH."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return folder


def fake_frameworks(folder, *names):
    """Make modules that can be found like frameworks, for a Python without any."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    return folder


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Return a function that calls `check_tools` with a PATH of chosen commands."""

    def check(*names, frameworks=BOTH, **env):
        folder = command_folder(tmp_path / "bin", *names)
        bh.check_tools({"PATH": str(folder), **env}, frameworks)

    return check


def test_missing_compiler_is_one_sentence(tmp_path):
    """The command reports in one sentence that no compiler is on PATH or next to Python."""
    modules = fake_frameworks(tmp_path / "modules", "torch")
    python = tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parent], check=True)
    done = subprocess.run(
        [python / "python", "-m", MODULE, "--cache", tmp_path / "cache"],
        cwd=ROOT,
        env={"PATH": str(command_folder(tmp_path / "bin", "make")), "PYTHONPATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "No C++ compiler was found: install g++" in one_line(done)


def test_no_framework_is_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", "-m", MODULE, "--cache", tmp_path / "cache"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Neither torch nor tensorflow is installed" in one_line(done)


@pytest.mark.parametrize("tool", ["make", "patch"])
def test_missing_make(tools, tool):
    with pytest.raises(bh.BuildError, match=f"{tool} was not found"):
        tools("g++", *{"make", "patch"} - {tool})


def test_missing_cmake(tools):
    with pytest.raises(bh.BuildError, match=r"CMake was not found: .* -m pip install 'cmake<4'"):
        tools("g++", "make", "patch", frameworks={"tensorflow": "2.21.0"})


@pytest.mark.parametrize("version", ["4.0.2", "3.5.1"])
def test_wrong_cmake(tools, tmp_path, version):
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\necho cmake version {version}\n")
    cmake.chmod(0o755)
    with pytest.raises(bh.BuildError, match=rf"CMake {version[:3]} cannot build Horovod"):
        tools("g++", "make", "patch", frameworks={"tensorflow": "2.21.0"}, HOROVOD_CMAKE=str(cmake))


def test_missing_python_headers(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(bh.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    with pytest.raises(bh.BuildError, match=r"C headers are missing.*python3\.\d+-dev"):
        tools("g++", "make", "patch")


def test_headers_may_be_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(bh.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    (tmp_path / "Python.h").write_text("")
    assert bh._has_python_header({"CPLUS_INCLUDE_PATH": f"/elsewhere:{tmp_path}"})
    assert not bh._has_python_header({"CPLUS_INCLUDE_PATH": ""})


def test_no_space(tmp_path):
    with pytest.raises(bh.BuildError, match=r"Only .* GB are free in .*1000000000000\.0 GB are n"):
        bh.check_space(tmp_path / "not" / "yet", 10**21)


def test_unwritable_cache():
    """A cache that cannot be written is reported; not even root can make folders in /proc."""
    assert "cannot be written" in one_line(run_module("--cache", "/proc/cache"))


def test_a_cache_that_is_a_file(tmp_path):
    (tmp_path / "cache").write_text("")
    assert "choose another with --cache" in one_line(run_module("--cache", tmp_path / "cache"))


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("error: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError('... Temporary failure in name resolution'))", "there is no network"),
        ("ERROR: No matching distribution found for horovod==0.28.1", "index does not have it"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "memory ran out"),
        ("/usr/bin/python3: No module named pip", "this Python has no pip"),
        ("x\n  a.cc:3:10: fatal error: mpi.h: No such file\ny\n", "fatal error: mpi.h"),
        ("CMake Error at CMakeLists.txt:7 (find_package):\n  Could NOT find MPI\n", "find MPI"),
        ("nothing known", "see the log"),
    ],
)
def test_explanations(output, cause):
    assert cause in bh.explain(output)


def test_a_failing_step_names_cause_and_log(tmp_path, capsys):
    log = tmp_path / "log"
    script = "import sys; print('error: it broke'); sys.exit(3)"
    with pytest.raises(bh.BuildError, match=r"compiling failed: error: it broke \(log: .*log\)"):
        bh._step("compiling", [sys.executable, "-c", script], os.environ, log)
    assert "compiling ... 0:00 failed" in capsys.readouterr().out
    assert "it broke" in log.read_text()


def test_without_an_index_fetching_fails_in_one_sentence(tmp_path):
    """Fetching fails with one sentence if the configuration of pip names no index."""
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    with pytest.raises(bh.BuildError, match="fetching horovod==0.28.1 failed: the package index"):
        bh.fetch_source(tmp_path, env, tmp_path / "log")


def test_long_steps_show_that_they_are_alive(tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(bh.time, "monotonic", lambda: float(next(clock)))
    script = "import time; print('[ 42%] Building', flush=True); time.sleep(1.2)"
    bh.run_step("compiling", [sys.executable, "-c", script], os.environ, tmp_path / "log")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2 and lines[0].startswith("compiling ... 0:") and "42%" in lines[-2]
    assert lines[-1].endswith("done")
