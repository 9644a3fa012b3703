"""Commands that run scripts of a checkout of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

import accordion_hvd
from accordion_hvd.tools.text import Misuse


class Forwarded(click.Command):
    """A command that passes all words on to another parser, --help and -- included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["arguments"] = tuple(args)
        return []


def run(name: str, arguments: tuple[str, ...]) -> None:
    """Replace this process by one that runs `scripts/NAME.py` with these arguments.

    Raises:
        Misuse: if there is no checkout.
    """
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


@click.command(cls=Forwarded)
def demo(arguments: tuple[str, ...]) -> None:
    """Train on digits with four workers (checkout)."""
    run("demo", arguments)


@click.command(cls=Forwarded)
def bench(arguments: tuple[str, ...]) -> None:
    """Time steps against plain Horovod (checkout)."""
    run("bench", arguments)


@click.command(cls=Forwarded)
def netbench(arguments: tuple[str, ...]) -> None:
    """Train on limited links (checkout; root)."""
    run("netbench", arguments)
