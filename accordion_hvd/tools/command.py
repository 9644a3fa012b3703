"""The console command `accordion-hvd`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import accordion_hvd
from accordion_hvd.engine.ledger import files
from accordion_hvd.engine.ledger.page import page
from accordion_hvd.tools import build_horovod, doctor
from accordion_hvd.tools.plan.command import plan

# `doctor` and `build_horovod` run where no package is installed, so they parse their own options.
FORWARDED = {"ignore_unknown_options": True, "help_option_names": []}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(accordion_hvd.__version__, prog_name="accordion-hvd")
def main() -> None:
    """Communication-efficient distributed training: check, build, and account for it."""


@main.command("doctor", context_settings=FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _doctor(arguments: tuple[str, ...]) -> None:
    """Check the installation, and say how to repair it."""
    sys.exit(doctor.main(arguments))


@main.command("build-horovod", context_settings=FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _build_horovod(arguments: tuple[str, ...]) -> None:
    """Compile and install Horovod for the frameworks of this environment."""
    sys.exit(build_horovod.main(arguments))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def receipt(folder: Path) -> None:
    """Write receipt.html from the ledger.json that a job writes to FOLDER, also while it runs."""
    ledgers = files.ledgers(folder)
    if not ledgers:
        raise click.ClickException(
            f"{folder} has no ledger.json; pass ledger={str(folder)!r} to DistributedOptimizer."
        )
    try:
        for path in ledgers:
            found = files.load(path)
            click.echo(files.write(files.receipt_of(path), page(found)))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None


main.add_command(plan)

if __name__ == "__main__":
    main(prog_name="accordion-hvd")
