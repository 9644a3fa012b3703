"""Tests of the distributed suites, and of the harness, which notices ranks that fail or hang.

Each check of a suite is one test for each launcher and number of ranks of the suite. A new suite is
a script in `tests/ranks` and one row in SUITES.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
from forked import modules_of
from launch import END, RANKS, SUITE, Outcome, Report, checks_of, command_for, launch, need, ranks

from benchmarks import processes


class Place(NamedTuple):
    """Where a suite runs.

    Attributes:
        launcher: a key of `launch.LAUNCHERS`.
        ranks: number of ranks.
        chosen: the checks that run there; () for all of them.
        nightly: whether `make test` leaves the launch out.
    """

    launcher: str
    ranks: int
    chosen: tuple[str, ...] = ()
    nightly: bool = False


def nightly(launcher: str, ranks: int, chosen: tuple[str, ...] = ()) -> Place:
    return Place(launcher, ranks, chosen, nightly=True)


GLOO = Place("gloo", 2)
MPI = Place("mpirun", 4)
BOTH = [GLOO, nightly("mpirun", 4)]  # each launcher, each number of ranks
AMONG_MORE = (
    "check_weights_are_equal_after_training",
    "check_accordion_switches_in_fit",
    "check_custom_loops",
)
"""Keras' checks that are more than repeated by more ranks, which take minutes for all of them."""

IN_PARTS = ("check_quantisers_give_the_simulated_bits", "check_parts_take_the_counted_bytes")
"""Core checks whose parts do not divide tensors evenly on an odd number of ranks."""

OF_HOROVOD = (
    "check_names_are_complete",
    "check_elastic_state",
    "check_dense_equals_stock_horovod",
    "check_stock_wrapper_refuses_ours",
)
"""PyTorch's checks that need Horovod."""

WITHOUT_HOROVOD = tuple(x for x in checks_of("torch_checks.py") if x not in OF_HOROVOD)


def carriers() -> list[Place]:
    """Return a place for each further engine that carries the tensors of Horovod's ranks."""
    if find_spec("torch") is None:
        return []
    from accordion_hvd.torch.engines import ENGINES

    names = [name for name, engine in ENGINES.items() if engine.join and name != "torch"]
    return [Place(f"carried-{name}", 2) for name in names]


SUITES: dict[str, list[Place]] = {
    "core_checks.py": [
        GLOO, MPI, Place("torchrun", 2), Place("torchrun", 4), Place("carried", 2), *carriers(),
        Place("gloo", 3, IN_PARTS), nightly("mpirun", 5, IN_PARTS),
    ],
    "torch_checks.py": [
        *BOTH,
        nightly("torchrun", 2, WITHOUT_HOROVOD),
        nightly("carried", 2, WITHOUT_HOROVOD),
        Place("carried", 4, ("check_weights_are_equal_after_training",)),
    ],
    "doors_checks.py": [GLOO, Place("torchrun", 2), nightly("mpirun", 4), nightly("carried", 2)],
    "engine_checks.py": [Place("torchrun", 2), nightly("torchrun", 4)],
    "ddp_checks.py": [nightly("torchrun", 2), Place("torchrun", 4)],
    "fsdp_checks.py": [Place("torchrun", 4)],
    "optimizer_checks.py": BOTH,
    "tf_checks.py": BOTH,
    "keras_checks.py": [GLOO, nightly("mpirun", 4, AMONG_MORE)],
    "keras_optimizer_checks.py": [GLOO, nightly("mpirun", 2)],
    "trainers_checks.py": [nightly("torchrun", 2)],
    "graph_checks.py": BOTH,
    "graph_training_checks.py": [GLOO],
    "privacy_torch_checks.py": [Place("gloo", 1), *BOTH],
    "privacy_keras_checks.py": [GLOO],
    "levers_checks.py": [GLOO],
    "levers_keras_checks.py": [GLOO],
    "levers_models_checks.py": [MPI],
    "levers_models_keras_checks.py": [MPI],
    "averaging_checks.py": [nightly("mpirun", 4), Place("mpirun", 5)],
    "torch_averaging_checks.py": [nightly("gloo", 4), MPI],
    "keras_averaging_checks.py": [GLOO],
    "keras_waiting_checks.py": [MPI],
}  # fmt: skip
"""Script -> where it runs. Each check is in `make test` at least once."""

CANARY = "core_checks.py"
"""The suite whose ranks are processes of their own, once per launcher, while others are forked."""


def everything() -> list[Any]:
    return [
        pytest.param(
            script,
            place,
            check,
            id=f"{script[:-3]}-{place.launcher}{place.ranks}-{check}",
            marks=[pytest.mark.nightly] if place.nightly else [],
        )
        for script, places in SUITES.items()
        for place in places
        for check in [*(place.chosen or checks_of(script)), END]
    ]


@pytest.mark.launch
@pytest.mark.timeout(SUITE + 30)
@pytest.mark.parametrize(("script", "place", "check"), everything())
def test_ranks(script: str, place: Place, check: str, request: Any) -> None:
    need(place.launcher)
    forked = script != CANARY or place[:2] == ("torchrun", 4)
    report = launch(script, *place[:2], SUITE, checks=place.chosen, forked=forked)
    request.node.user_properties.append(("seconds", report.seconds_of(check)))
    problem = report.problem(check)
    if problem:
        pytest.fail(problem, pytrace=False)


by_launcher = pytest.mark.parametrize(
    ("launcher", "forked"),
    [(launcher, forked) for launcher in ("gloo", "mpirun", "torchrun") for forked in (True, False)],
    ids=lambda x: x if isinstance(x, str) else ("forked" if x else "own"),
)


@pytest.mark.launch
@pytest.mark.timeout(120)
@by_launcher
def test_a_rank_that_fails_is_named(launcher: str, forked: bool) -> None:
    need(launcher)
    report = launch("failing_checks.py", launcher, 2, 60, 30, forked=forked)
    assert report.status not in (0, None)
    assert report.seconds < 40, "the others should have been ended"
    assert report.problem("check_passes") is None
    problem = report.problem("check_fails_on_rank_1")
    assert problem and "failed on rank(s) [1]" in problem
    assert "ValueError: intended" in problem
    later = report.problem("check_is_not_reached")
    assert later and "not reached" in later
    assert "rank 1 failed in check_fails_on_rank_1" in later
    assert report.problem(END)


def test_the_output_is_told_if_no_rank_has_begun() -> None:
    """Of a rank that fails in a check, the output stands at that check only."""
    early = Report(["horovodrun"], 2, {"(init)": {0: Outcome("begin")}}, status=1, output="why")
    assert (early.problem("check_it") or "").endswith("why")
    late = Report(["horovodrun"], 2, {"check_a": {0: Outcome("fail")}}, status=1, output="why")
    assert "why" not in (late.problem("check_it") or "")


@pytest.mark.launch
@pytest.mark.timeout(120)
@by_launcher
def test_a_rank_that_hangs_is_named(launcher: str, forked: bool) -> None:
    need(launcher)
    report = launch("hanging_checks.py", launcher, 2, 60, 4, forked=forked)
    assert report.status not in (0, None)
    assert report.seconds < 50, "a hang must end by the limit of its check"
    assert report.problem("check_passes") is None
    problem = report.problem("check_hangs_on_rank_1")
    assert problem and "took too long on rank(s) [1]" in problem
    assert "in wait_for_ever" in problem
    assert report.last(0) == "check_waits_for_rank_1"
    waiting = report.problem("check_waits_for_rank_1")
    assert waiting and "in wait_for_others" in waiting


@pytest.mark.launch
@pytest.mark.timeout(120)
@by_launcher
def test_a_launch_that_does_not_end_is_ended(launcher: str, forked: bool) -> None:
    """The harness ends a launch that exceeds the limit of the whole launch; no process is left."""
    need(launcher)
    report = launch("hanging_checks.py", launcher, 2, 12, 300, forked=forked)
    assert report.status is None
    assert report.seconds < 30
    problem = report.problem("check_hangs_on_rank_1")
    assert problem and "was ended after" in problem
    assert "in wait_for_ever" in problem and "last in check_waits_for_rank_1" in problem
    assert not list(processes.started("CHECK_FOLDER", report.folder))


@pytest.mark.launch
@pytest.mark.timeout(120)
@by_launcher
def test_a_rank_that_crashes_is_named(launcher: str, forked: bool) -> None:
    need(launcher)
    report = launch("crashing_checks.py", launcher, 2, 60, 30, forked=forked)
    assert report.status not in (0, None)
    assert report.seconds < 40, "the others should have been ended"
    problem = report.problem("check_crashes_on_rank_1")
    assert problem and "rank 1 has ended" in problem


@ranks(2, launcher=["gloo", "torchrun"])
def test_a_function_runs_on_each_rank() -> None:
    import torch

    import accordion_hvd.torch as hvd

    hvd.init()
    assert hvd.size() == 2
    assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item() == 1


def test_a_function_that_fails_names_its_rank() -> None:
    need("torchrun")
    with pytest.raises(pytest.fail.Exception, match=r"failed on rank\(s\) \[1\](.|\n)*intended"):
        fails_on_rank_1(launcher="torchrun", count=2)


@ranks(2, launcher="torchrun")
def fails_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("intended")


def test_make_test_has_each_check_launcher_and_world() -> None:
    """Each check, each framework over each launcher, and each number of ranks is in `make test`.

    Other packages' trainers are not: their versions change without this package.
    """
    of_ours = {script: places for script, places in SUITES.items() if "trainers" not in script}
    every = [(script, place) for script, places in of_ours.items() for place in places]
    quick = [(script, place) for script, place in every if not place.nightly]

    def checks(some: list[tuple[str, Place]]) -> set[tuple[str, str]]:
        return {(script, x) for script, place in some for x in place.chosen or checks_of(script)}

    def launchers(some: list[tuple[str, Place]]) -> set[tuple[str, str]]:
        return {
            (framework, place.launcher)
            for script, place in some
            for framework in {"torch", "tensorflow"} & set(modules_of(RANKS / script))
        }

    assert checks(quick) == checks(every)
    assert launchers(quick) == launchers(every)
    assert {place.ranks for _, place in quick} == {place.ranks for _, place in every}


def test_checks_are_found_in_order() -> None:
    assert checks_of("failing_checks.py") == [
        "check_passes",
        "check_fails_on_rank_1",
        "check_is_not_reached",
    ]
    assert checks_of("not_there.py") == []


def test_root_is_allowed_only_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    need("mpirun")
    for user, allowed in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert ("--allow-run-as-root" in command_for("mpirun", 2, ["true"])) is allowed
