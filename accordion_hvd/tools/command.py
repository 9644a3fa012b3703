"""The console command `accordion-hvd`.

Modules of its commands import what they need when they run, so that help and completion are quick.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from click.shell_completion import get_completion_class

import accordion_hvd
from accordion_hvd.tools.inspector import inspect
from accordion_hvd.tools.plan.command import plan
from accordion_hvd.tools.text import Misuse

NAME = "accordion-hvd"
_COMPLETION = f"""Print the script that completes the words of this command in SHELL.

Save the output as one of these files, and start a new shell:

\b
bash  ~/.local/share/bash-completion/completions/{NAME}
zsh   _{NAME} in a folder of $fpath
fish  ~/.config/fish/completions/{NAME}.fish
"""
_SCRIPTS = {
    "demo": "Train on digits with four workers (checkout).",
    "bench": "Time steps against plain Horovod (checkout).",
    "netbench": "Train on limited links (checkout; root).",
}
"""Scripts of a checkout that are commands, too -> their help."""


class Forwarded(click.Command):
    """A command that passes all words on to another parser, --help and -- included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["arguments"] = tuple(args)
        return []


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(accordion_hvd.__version__, prog_name=NAME)
def main() -> None:
    """Communication-efficient distributed training: check, build, and account for it.

    The exit status is 0 if all is well, 1 if a problem was found, and 2 if the command was used
    wrongly.
    """


@main.command("doctor", cls=Forwarded)
def _doctor(arguments: tuple[str, ...]) -> None:
    """Check the installation, and say how to repair it."""
    from accordion_hvd.tools import doctor

    sys.exit(doctor.main(arguments, f"{NAME} doctor"))


@main.command("build-horovod", cls=Forwarded)
def _build_horovod(arguments: tuple[str, ...]) -> None:
    """Compile and install Horovod for these frameworks."""
    from accordion_hvd.tools import build_horovod

    sys.exit(build_horovod.main(arguments, f"{NAME} build-horovod"))


@main.command(short_help="Write receipt.html from a job's ledger.json.")
@click.argument("folder", type=click.Path(path_type=Path))
def receipt(folder: Path) -> None:
    """Write receipt.html from the ledger.json that a job writes to FOLDER, also while it runs."""
    from accordion_hvd.engine.ledger import files

    ledgers = files.ledgers(folder)
    if not ledgers:
        raise click.ClickException(
            f"{folder} has no ledger.json; pass ledger={str(folder)!r} to DistributedOptimizer."
        )
    try:
        for path in ledgers:
            click.echo(files.write_receipt(path, files.load(path)))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None


@main.command(help=_COMPLETION, short_help="Print the script of a shell's completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script of a shell."""
    found = get_completion_class(shell)
    assert found is not None
    variable = f"_{NAME}_complete".replace("-", "_").upper()
    click.echo(found(context.find_root().command, {}, NAME, variable).source())


def run(name: str, arguments: Sequence[str]) -> None:
    """Replace this process by one that runs a checkout's `scripts/NAME.py` with these arguments."""
    folders = [Path.cwd(), Path(accordion_hvd.__file__).resolve().parents[1]]
    for folder in folders:
        script = folder / "scripts" / f"{name}.py"
        if script.is_file() and (folder / "accordion_hvd" / "__init__.py").is_file():
            os.execv(sys.executable, [sys.executable, str(script), *arguments])
    looked = " nor ".join(dict.fromkeys(map(str, folders)))
    raise Misuse(
        f"scripts/{name}.py is part of a checkout of accordion_hvd, but neither {looked} is one; "
        "run this command in a checkout."
    )


for _command in (plan, inspect):
    main.add_command(_command)
for _name, _help in _SCRIPTS.items():
    _run = functools.partial(run, _name)
    main.add_command(Forwarded(_name, callback=_run, help=_help))

if __name__ == "__main__":
    main(prog_name=NAME)
