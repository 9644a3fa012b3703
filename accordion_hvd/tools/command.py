"""The console command `accordion-hvd`.

Modules of its commands import what they need when they run, so that help and completion are quick.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

import accordion_hvd
from accordion_hvd.tools import checkout
from accordion_hvd.tools.checkpoints import checkpoint
from accordion_hvd.tools.completion import NAME, completion
from accordion_hvd.tools.plan.command import plan
from accordion_hvd.tools.replay import replay


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(accordion_hvd.__version__, prog_name=NAME)
def main() -> None:
    """Communication-efficient distributed training: check, build, and account for it.

    The exit status is 0 if all is well, 1 if a problem was found, and 2 if the command was used
    wrongly.
    """


@main.command("doctor", cls=checkout.Forwarded)
def _doctor(arguments: tuple[str, ...]) -> None:
    """Check the installation, and say how to repair it."""
    from accordion_hvd.tools import doctor

    sys.exit(doctor.main(arguments, f"{NAME} doctor"))


@main.command("build-horovod", cls=checkout.Forwarded)
def _build_horovod(arguments: tuple[str, ...]) -> None:
    """Compile and install Horovod for these frameworks."""
    from accordion_hvd.tools import build_horovod

    sys.exit(build_horovod.main(arguments, f"{NAME} build-horovod"))


@main.command(short_help="Write receipt.html from a job's ledger.json.")
@click.argument("folder", type=click.Path(path_type=Path))
def receipt(folder: Path) -> None:
    """Write receipt.html from the ledger.json that a job writes to FOLDER, also while it runs."""
    from accordion_hvd.engine.ledger import files
    from accordion_hvd.engine.ledger.page import page

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


for _command in (
    plan,
    checkpoint,
    replay,
    completion,
    checkout.demo,
    checkout.bench,
    checkout.netbench,
):
    main.add_command(_command)

if __name__ == "__main__":
    main(prog_name=NAME)
