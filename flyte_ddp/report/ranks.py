"""Where the seconds of ranks and hosts have gone, as tables: of many, those that the others waited for most."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from flyte_ddp.events import RanksTimed

SECONDS = ("Waits for data", "Computes", "Waits for others", "Is waited for")
MOST_HOSTS = 16  # lines in a table


class Table(NamedTuple):
    title: str
    heads: Sequence[str]
    lines: list[list[str]]


def rank_tables(hosts: Sequence[str], times: RanksTimed, most: int) -> list[Table]:
    """A line for each rank, of which there are `most` at most, and, of several hosts, one for each of these with the
    means of its ranks. hosts: by rank; ValueError if they are not those that were timed."""
    of_rank = list(zip(times.data, times.computing, times.waiting, times.waited_for, strict=True))
    ranks_of: dict[str, list[int]] = {}
    for rank, host in zip(range(len(of_rank)), hosts, strict=True):
        ranks_of.setdefault(host, []).append(rank)
    of_host = [
        [sum(values) / len(ranks) for values in zip(*(of_rank[rank] for rank in ranks), strict=True)]
        for ranks in ranks_of.values()
    ]
    names = [f"{host}, mean of {len(ranks)}" for host, ranks in ranks_of.items()]
    tables = [_table("rank", [f"{rank} on {host}" for rank, host in enumerate(hosts)], of_rank, most)]
    return tables + ([_table("host", names, of_host, MOST_HOSTS)] if len(ranks_of) > 1 else [])


def _table(what: str, names: Sequence[str], seconds: Sequence[Sequence[float]], most: int) -> Table:
    size = len(names)
    shown = sorted(heapq.nlargest(most, range(size), lambda number: seconds[number][-1]))
    title = f"Seconds of each {what}" if size <= most else f"Seconds of the {most} slowest of {size} {what}s"
    lines = [[names[number], *(f"{value:,.2f}" for value in seconds[number])] for number in shown]
    return Table(title, (what.capitalize(), *SECONDS), lines)


def in_text(table: Table) -> str:
    """For a terminal."""
    kind, *seconds = table.heads
    lines = [[f"{table.title}:", *seconds], *([f"{kind.lower()} {name}", *values] for name, *values in table.lines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([name.ljust(widths[0]), *map(str.rjust, values, widths[1:])]) for name, *values in lines)
