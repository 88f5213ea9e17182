"""Formats for people: names, measures, times and tables of ranks' seconds."""

import heapq
import math
from collections.abc import Container, Sequence
from typing import NamedTuple

from flyte_ddp.events import RanksTimed, RunStarted

SECONDS = ("Waits for data", "Computes", "Waits for others", "Is waited for")
MOST_HOSTS = 16  # lines in a table


def in_words(name: str) -> str:
    """Return a name as people write it: top5 accuracy for top5_accuracy."""
    return name.replace("_", " ")


def capitalised(text: str) -> str:
    """Return the text with its first letter in upper case, and the others as they are: BLEU stays BLEU."""
    return text[:1].upper() + text[1:]


def split_sizes(run: RunStarted) -> str:
    """Return how many samples each split has: "59,000 training, 1,000 validation and 10,000 test images".

    Returns an empty text for the run of a script, whose samples nobody knows.
    """
    if not run.samples:
        return ""
    counts = [f"{run.train_samples:,} training" if run.train_samples else "an unknown number of training"]
    if run.validation_samples:
        counts.append(f"{run.validation_samples:,} validation")
    if run.test_samples:
        counts.append(f"{run.test_samples:,} test")
    *others, last = counts
    return f"{', '.join(others)} and {last} {run.samples}" if others else f"{last} {run.samples}"


def start_position(run: RunStarted) -> str:
    """Return where a run goes on: "epoch 2, step 3"; empty for a script, which chooses its checkpoint itself."""
    return f"epoch {run.first_epoch + 1}, step {run.first_step + 1}" if run.epochs else ""


def format_measure(name: str, value: float, percent: Container[str], decimals: int = 4) -> str:
    """Format a measure's value.

    A measure named in `percent` is written as a percentage: 0.5 as "50.00%". The measure "loss" has a fixed number of
    decimals. Any other measure has four significant digits. A value that is not finite is written as "nan", "inf" or
    "-inf".

    Args:
        name: the measure's name.
        value: the value.
        percent: names of the measures that are written as percentages.
        decimals: the decimals of a loss. A percentage has two less.
    """
    if not math.isfinite(value):
        return str(value)
    if name in percent:
        return f"{value:.{decimals - 2}%}"
    return f"{value:.{decimals}f}" if name == "loss" else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def time_left(run: RunStarted, seconds: float | None) -> str:
    """Return how long a training still takes; empty if that is unknown, or next to nothing."""
    if seconds is None or seconds < 1:
        return ""
    return f"{'at most ' * run.may_end_early}{format_duration(seconds)} left"


class Table(NamedTuple):
    """A table of texts."""

    title: str
    heads: Sequence[str]
    lines: list[list[str]]


def rank_tables(hosts: Sequence[str], times: RanksTimed, most: int) -> list[Table]:
    """Return a table of each rank's seconds by what it did; with several hosts, also one of means over a host's ranks.

    Args:
        hosts: the host of each rank.
        times: the seconds of each rank.
        most: how many ranks the first table has at most: those that the others waited for longest. The other table has
            MOST_HOSTS hosts at most, chosen likewise.
    """
    of_rank = list(zip(times.data, times.computing, times.waiting, times.waited_for, strict=True))
    by_host: dict[str, list[int]] = {}
    for rank, host in zip(range(len(of_rank)), hosts, strict=True):
        by_host.setdefault(host, []).append(rank)
    of_host = []
    for ranks in by_host.values():
        columns = zip(*(of_rank[rank] for rank in ranks), strict=True)
        of_host.append([sum(column) / len(ranks) for column in columns])
    names = [f"{host}, mean of {len(ranks)}" for host, ranks in by_host.items()]
    tables = [_table("rank", [f"{rank} on {host}" for rank, host in enumerate(hosts)], of_rank, most)]
    return tables + ([_table("host", names, of_host, MOST_HOSTS)] if len(by_host) > 1 else [])


def _table(what: str, names: Sequence[str], seconds: Sequence[Sequence[float]], most: int) -> Table:
    size = len(names)
    shown = sorted(heapq.nlargest(most, range(size), lambda number: seconds[number][-1]))
    title = f"Seconds of each {what}" if size <= most else f"Seconds of the {most} slowest of {size} {what}s"
    lines = [[names[number], *(f"{value:,.2f}" for value in seconds[number])] for number in shown]
    return Table(title, (what.capitalize(), *SECONDS), lines)


def format_table(table: Table) -> str:
    """Format a table for a terminal: columns of equal width, with the title at the top left."""
    kind, *seconds = table.heads
    lines = [[f"{table.title}:", *seconds], *([f"{kind.lower()} {name}", *values] for name, *values in table.lines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [[name.ljust(widths[0]), *map(str.rjust, values, widths[1:])] for name, *values in lines]
    return "\n".join("  ".join(row) for row in rows)
