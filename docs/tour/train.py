"""Steps 6 to 8: the library starts and watches the ranks, or is itself one of torchrun's ranks."""

import multiprocessing
import os
import signal

import click

from flyte_ddp import train
from flyte_ddp.events import EpochFinished, Event
from flyte_ddp.report.console import Console
from settings import Settings


@click.command()
@click.argument("output")
@click.option("--kill", is_flag=True, help="Kill rank 1 after two epochs.")
def main(output: str, kill: bool) -> None:
    say = Console()

    def watch(event: Event) -> None:
        say(event)
        if kill and isinstance(event, EpochFinished) and event.epoch == 1:
            last = max(multiprocessing.active_children(), key=lambda child: child.name)
            os.kill(last.pid or 0, signal.SIGKILL)

    train("recipe:Digits", Settings(), output=output, on_event=watch)  # by two ranks, where there is no GPU


if __name__ == "__main__":
    main()
