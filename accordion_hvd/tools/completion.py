"""The command `accordion-hvd completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

NAME = "accordion-hvd"
HELP = f"""Print the script that completes the words of this command in SHELL.

Save the output as one of these files, and start a new shell:

\b
bash  ~/.local/share/bash-completion/completions/{NAME}
zsh   _{NAME} in a folder of $fpath
fish  ~/.config/fish/completions/{NAME}.fish
"""


@click.command(help=HELP, short_help="Print the script of a shell's completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script of a shell."""
    found = get_completion_class(shell)
    assert found is not None
    variable = f"_{NAME}_complete".replace("-", "_").upper()
    click.echo(found(context.find_root().command, {}, NAME, variable).source())
