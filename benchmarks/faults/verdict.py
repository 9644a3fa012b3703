"""Evaluation of launches: the outcome, its time, the steps lost, and whether weights agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.faults.cases import ENDS, GOES_ON, REFUSED, SKIPS, SPREADS, STEPS, Case
from benchmarks.faults.launch import Launch

Row = dict[str, Any]

_LONGEST = 4000  # characters of an error that a row keeps

NOT_FINITE = "weights are not finite"
OTHER_WEIGHTS = "the weights are not those of a training without the fault"


def judge(case: Case, launches: Sequence[Launch], reference: Sequence[int | None]) -> Row:
    """Return the row of a case.

    Args:
        case: the case.
        launches: its launches; the second loads what the first saved.
        reference: checksums of the weights after each step of a training without a fault.

    Returns:
        A row with these keys:
            happened: a sentence.
            seconds: seconds until every rank knew of the fault; None if there was none.
            lost: number of steps since the checkpoint that is left, if the ranks ended.
            equal: whether the weights of the ranks were equal after every step.
            errors: errors that the ranks raised.
            hung: whether a rank or the launcher did not end.
            wrong: whether a training that went on has wrong weights.
            problem: why the case does not meet its expectation, or an empty string.
    """
    launch = launches[-1]
    ended = not _finished(launch)
    row: Row = {
        "seconds": _seconds(case, launches[0]),
        "lost": _lost(launches) if ended or len(launches) > 1 else 0,
        "equal": all(differing(case, found) is None for found in launches),
        "hung": any(hung(case, found) for found in launches),
        "errors": [text[:_LONGEST] for text in _errors(case, launch)],
        "happened": _happened(case, launch),
    }
    row["problem"] = _problem(case, launches, row, reference)
    row["wrong"] = row["problem"] in (NOT_FINITE, OTHER_WEIGHTS)
    return row


def checksums(launch: Launch, rank: int = 0) -> list[int | None]:
    """Return the checksum of a rank's weights after each step; None for steps without one."""
    found = {e["step"]: e["crc"] for e in launch.events.get(rank, ()) if e["event"] == "step"}
    return [found.get(step) for step in range(1, STEPS + 1)]


def differing(case: Case, launch: Launch) -> int | None:
    """Return the first step after which ranks had different weights, where they must be equal."""
    columns = zip(*(checksums(launch, rank) for rank in launch.events), strict=True)
    for step, column in enumerate(columns, 1):
        apart = case.method == "wagma" or (case.method == "local" and step % 2)
        if not apart and len(set(column) - {None}) > 1:
            return step
    return None


def hung(case: Case, launch: Launch) -> bool:
    """Return whether the launch had to be ended."""
    others = launch.events.keys() - {case.rank if case.silent else None}
    return (launch.status is None and not case.silent) or not others <= launch.ended.keys()


def _finished(launch: Launch) -> bool:
    return launch.status == 0 and all(launch.first(rank, "end") for rank in launch.events)


def _seconds(case: Case, launch: Launch) -> float | None:
    """Return the seconds from the fault until the last rank had ended or taken its next step."""
    fault = launch.fault()
    if fault is None:
        return None
    times = []
    for rank, events in launch.events.items():
        if rank == case.rank and case.action in ("kill", "stop"):
            continue
        later = [e for e in events if e["time"] >= fault and e["event"] in ("step", "error")]
        if case.expected in (GOES_ON, SKIPS, SPREADS) and later:
            times.append(later[0]["time"])
        elif rank in launch.ended:
            times.append(launch.ended[rank])
    return round(max(times) - fault, 1) if times else None


def _lost(launches: Sequence[Launch]) -> int:
    """Return the number of steps since the last checkpoint, or since the one that was loaded."""
    events = [event for launch in launches for rank in launch.events.values() for event in rank]
    before = [event for rank in launches[0].events.values() for event in rank]
    taken = max((e["step"] for e in before if e["event"] == "step"), default=0)
    saved = max((e["step"] for e in before if e["event"] == "saved"), default=0)
    return taken - next((e["step"] for e in events if e["event"] == "resumed"), saved)


def _errors(case: Case, launch: Launch) -> list[str]:
    """Return the errors that the ranks raised, those of the ranks without a fault first."""
    order = sorted(launch.events, key=lambda rank: (rank == case.rank, rank))
    found = (launch.first(rank, "error") for rank in order)
    return [event["text"] for event in found if event]


def _happened(case: Case, launch: Launch) -> str:
    if hung(case, launch):
        return "hung"
    resumed = [event for r in launch.events if (event := launch.first(r, "resumed"))]
    since = f"continued from step {resumed[0]['step']}; " if resumed else ""
    if _finished(launch):
        skipped = launch.events[0][-1].get("skipped", 0)
        steps = "step" if skipped == 1 else "steps"
        return f"{since}trained to the end" + (f", {skipped} {steps} skipped" if skipped else "")
    raised, ranks = len(_errors(case, launch)), len(launch.events)
    return since + (
        f"{raised} of {ranks} ranks raised" if raised else "the launcher ended the ranks"
    )


def _problem(
    case: Case, launches: Sequence[Launch], row: Row, reference: Sequence[int | None]
) -> str:
    launch = launches[-1]
    if row["hung"]:
        return "a rank or the launcher did not end"
    if case.place not in ("", "files") and launches[0].fault() is None:
        return "the fault did not happen"
    if not row["equal"] and case.expected != REFUSED:
        return f"weights differ after step {differing(case, launch)}"
    if row["seconds"] is not None and row["seconds"] > case.limit:
        return f"took more than {case.limit:g} s"
    faulty = launches[0 if case.place != "files" else -1]  # the launch with the fault
    told = faulty.events.keys() - ({case.rank} if case.expected == ENDS else set())
    errors = [found["text"] for number in told if (found := faulty.first(number, "error"))]
    if case.says and not (errors and all(re.search(case.says, error) for error in errors)):
        return "an error says something else"
    check = _CHECKS.get(case.expected, _check_training)
    return check(case, launches, reference)


def _check_end(case: Case, launches: Sequence[Launch], reference: Sequence[int | None]) -> str:
    if case.resumed_on:
        return _check_training(case, launches, reference)
    return "the launch succeeded" if launches[0].status == 0 else ""


def _check_refusal(case: Case, launches: Sequence[Launch], reference: Sequence[int | None]) -> str:
    errors = _errors(case, launches[0 if case.place != "files" else -1])
    if len(errors) < case.ranks:
        return f"{case.ranks - len(errors)} ranks raised no error"
    if case.resumed_on and case.place != "files":
        return _check_training(case, launches, reference)
    return ""


def _check_training(case: Case, launches: Sequence[Launch], reference: Sequence[int | None]) -> str:
    launch = launches[-1]
    if not _finished(launch):
        return "the training did not reach its end"
    if not _finite(launch):
        return NOT_FINITE
    comparable = case.expected != SKIPS and case.method == "topk" and reference
    if comparable and case.resumed_on in (0, case.ranks):
        if checksums(launch)[-1] != reference[-1]:
            return OTHER_WEIGHTS
    return ""


def _check_spread(case: Case, launches: Sequence[Launch], reference: Sequence[int | None]) -> str:
    if not _finished(launches[-1]):
        return "the training did not reach its end"
    return "weights are finite" if _finite(launches[-1]) else ""


def _finite(launch: Launch) -> bool:
    return all(e.get("finite", True) for events in launch.events.values() for e in events)


_CHECKS = {ENDS: _check_end, REFUSED: _check_refusal, SPREADS: _check_spread}
