"""Storms: `make storm` and their section of docs/reliability.md.

storm.py [SPEC ...]        train with each compression, calmly and in a storm; root
storm.py report            write all results that exist into the page

Results that exist are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.netbench import sandbox
from benchmarks.storm import job, page
from examples.results import write_json

MODULE = "benchmarks.storm.command"
METHODS = ("none", "powersgd:4", "topk:0.01", "wagma:4,10")
NUMBERS = ("ranks", "steps", "pace", "every", "interval", "lr", "seed")


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("storm.py", description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("methods", nargs="*", default=list(METHODS), help="spec strings, or `report`")
    defaults = {field.name: field.default for field in fields(job.Settings)}
    for name in NUMBERS:
        value = defaults[name]
        add(f"--{name}", type=type(value), default=value, help=f"see job.Settings ({value})")
    add("--limit", type=float, default=3600.0, help="seconds of a training that hangs (3600)")
    add("--output", type=Path, default=Path("runs/storm"), help="folder for results")
    add("--page", type=Path, default=Path("docs/reliability.md"), help="page to update")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = options().parse_args(words)
    try:
        if chosen.methods == ["report"]:
            page.write(chosen.output, chosen.page)
        elif not sandbox.inside():
            raise SystemExit(sandbox.enter(words, MODULE))
        else:
            raise SystemExit(sandbox.run(lambda folder, tag: _measure(chosen, folder)))
    except sandbox.Refusal as refusal:
        raise SystemExit(f"storm.py: {refusal}") from None


def _measure(chosen: argparse.Namespace, folder: Path) -> int:
    """Train with all methods, calmly and in a storm; return the exit status."""
    job.prepare(folder)
    base = job.Settings("none", **{name: getattr(chosen, name) for name in NUMBERS})
    failures = 0
    for method in chosen.methods:
        calm = replace(base, compression=method, pace=0.0, interval=0.0)
        stormy = replace(base, compression=method)
        for kind, settings in {"calm": calm, "storm": stormy}.items():
            name = f"{method.replace(':', '-').replace(',', '-')}-{kind}"
            file = chosen.output / f"{name}.json"
            if file.exists():
                continue
            storm = job.Storm(settings, folder / name, chosen.limit)
            found = storm.run()
            print(f"storm.py: {name}: {page.summary(found)}", flush=True)
            if found["status"] == 0:
                write_json(file, found)
            else:
                failures += 1
                print((storm.folder / "output").read_text()[-4000:], flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    main()
