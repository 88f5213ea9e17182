"""The command `python -m flyte_ddp compare RUN RUN`, which says whether two trainings gave the same bits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import click

from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochFinished, RunStarted
from flyte_ddp.report.progress import FORMAT, parse_event
from flyte_ddp.text import counted
from flyte_ddp.watch.command import File, finite, printable
from flyte_ddp.watch.traces import Step, compare_traces, read_trace


@dataclass
class Recorded:
    """The digests in a run's progress file, and the facts that they may depend on.

    Attributes:
        facts: the facts by name.
        digests: the digest of the weights at each evaluation, by its position in epochs.
        model: the digest of model.pt; empty unless training has finished.
        trace: what its steps with options.trace_every have computed, by the number of the step.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    digests: dict[float, str] = field(default_factory=dict)
    model: str = ""
    trace: dict[int, Step] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "finished":
            self.model = str(line.get("digest", ""))
        event = parse_event(dict(line))
        if isinstance(event, RunStarted):
            begin = event.first_epoch + event.first_step / (event.steps_per_epoch or 1)
            before = {position: digest for position, digest in self.digests.items() if position <= begin}
            self.facts = collect_run_facts(event)
            self.digests = {**before, **{float(at): one for at, one in event.earlier}}
        elif isinstance(event, EpochFinished):
            self.digests[event.position] = event.digest


def collect_run_facts(event: RunStarted) -> dict[str, str]:
    """Return what may explain a difference between two trainings, as text by name.

    These are the settings, all else that determines the result, such as data and code, and facts about the machines
    that the training has run on, named "ran on: ...".
    """
    named = {**event.identity, "dataset": event.dataset}
    for name, value in named.pop("settings", {}).items():
        named[f"setting {name}" if name in named else name] = value
    facts = {name: json.dumps(value, ensure_ascii=False) for name, value in named.items()}
    for name in dict.fromkeys(chain.from_iterable(event.ran_on)):
        values = [str(machine[name]) for machine in event.ran_on if name in machine]
        facts[f"ran on: {name}"] = ", then ".join(value for value, _ in groupby(values))
    return facts


def read(place: str) -> Recorded:
    """Read the digests and facts in a training's progress file, up to the last whole line, and the training's trace.

    Args:
        place: the file, the training's folder or logs, or a URL of them in Flyte's storage.

    Raises:
        InputError: there is no such file, it is no progress file or trace, a newer version has written it, the training
            has not begun its first step, or an evaluation has no digest.
    """
    file = File(place)
    recorded = Recorded()
    for text in file.read_on(0).split(b"\n")[:-1]:
        try:
            line = printable(json.loads(text, parse_constant=finite, parse_float=finite))
            if line.get("format", FORMAT) > FORMAT:
                raise ValueError
            recorded.add(line)
        except Exception:  # a line may be anything
            raise InputError(
                f"{file.path} is not the progress of a training that this version knows: {text[:100]!r}"
            ) from None
    if not recorded.facts or not all(recorded.digests.values()):
        raise InputError(f"{file.path} has no digests: give a training of this version that has begun its first step")
    recorded.trace = read_trace(file.path)
    return recorded


@click.command()
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
@click.pass_context
def compare(context: click.Context, first: str, second: str) -> None:
    """Print where the weights of two trainings first differ, and which settings, data or hardware differ.

    The command names the first evaluation with other weights. If both were trained with the option trace_every, it also
    names the first traced step that differs, and the first layer in this step.

    RUN is a training's folder, its output `logs`, the `output` of train(), or the URL of one in Flyte's storage. The
    exit status is 0 if both have finished with the same weights at each evaluation and in model.pt, 1 if not, and 2 if
    a RUN is no training.
    """
    runs = [read(place) for place in (first, second)]
    for place, run in zip((first, second), runs, strict=True):
        count = f"{len(run.digests)} evaluation" + "s" * (len(run.digests) != 1)
        click.echo(f"{place}: {count}, {f'model.pt {run.model}' if run.model else 'not finished'}")
    is_equal, text = compare_runs(*runs)
    click.echo(text)
    if runs[0].trace and runs[1].trace:
        click.echo(compare_traces(runs[0].trace, runs[1].trace))
    elif not is_equal:
        click.echo("To find the first step and layer that differ, train both again with the option trace_every")
    click.echo("\n".join(list_differences(*runs)))
    context.exit(0 if is_equal else 1)


def compare_runs(one: Recorded, other: Recorded) -> tuple[bool, str]:
    """Compare the digests of two runs' weights, and return whether all are equal, and a text that says so or why not.

    The runs are equal if both have finished with the same digest of model.pt, and have at least one evaluation, all at
    the same positions with the same digests. The text names the first evaluation with different digests. If there is
    none, it says that no evaluation is common to both, that one run goes further or has not finished, or that model.pt
    differs.
    """
    both = sorted(one.digests.keys() & other.digests.keys())
    differing = [position for position in both if one.digests[position] != other.digests[position]]
    if differing:
        equal = [position for position in both if position < differing[0]]
        until = f"are equal up to epoch {counted(equal[-1])} and differ" if equal else "differ"
        place = "the next evaluation, " if equal else "the first evaluation, "
        return False, f"The weights {until} from {place}epoch {counted(differing[0])}, on"
    same = f"the {len(both)} evaluations that both have" if len(both) > 1 else "the only evaluation that both have"
    if not both:
        return False, "There is no evaluation that both have"
    if one.digests.keys() != other.digests.keys() or not (one.model and other.model):
        return False, f"The weights are equal at {same}, but one goes further, or has not finished"
    if one.model != other.model:
        return False, f"The weights are equal at {same}, but those of model.pt differ"
    return True, f"The weights are equal at {same}, and in model.pt"


def list_differences(one: Recorded, other: Recorded) -> list[str]:
    """Return lines to print: a heading, and both values of each fact in which the runs differ; or that none differs."""
    names = dict.fromkeys((*one.facts, *other.facts))
    values = {name: (one.facts.get(name, "unknown"), other.facts.get(name, "unknown")) for name in names}
    lines = [f"  {name}: {first} | {second}" for name, (first, second) in values.items() if first != second]
    if not lines:
        return ["Settings, data, code, init, hardware, torch, precision, ranks and threads are the same"]
    return ["These differ:", *lines]
