"""The command `python -m flyte_ddp`, with the commands that pyflyte lacks."""

import pkgutil

import click

import flyte_ddp
from flyte_ddp.report.console import show_output

# Names of functions, so that a command imports only what it needs
COMMANDS = {
    "compare": "flyte_ddp.watch.compare:compare",
    "new": "flyte_ddp.new.command:new",
    "run": "flyte_ddp.run.command:run",
    "script": "flyte_ddp.script.command:script",
    "watch": "flyte_ddp.watch.command:watch",
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = pkgutil.resolve_name(COMMANDS[cmd_name]) if cmd_name in COMMANDS else None
        return command


@click.group(cls=Commands)
@click.version_option(flyte_ddp.__version__)
def main() -> None:
    """Run one of flyte_ddp's own commands; `pyflyte` has the others."""
    show_output()


if __name__ == "__main__":
    main()
