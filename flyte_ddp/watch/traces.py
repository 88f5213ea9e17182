"""The traces of two trainings, compared: the first traced step that differs, and in it the first layer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from flyte_ddp.engine.monitor.trace import BATCH, FILE, LOSS, NETWORK
from flyte_ddp.errors import InputError
from flyte_ddp.text import listed
from flyte_ddp.watch.command import File, printable

MOST_NAMED = 3  # weights in a sentence


@dataclass(frozen=True)
class Step:
    """A step of a trace.

    Attributes:
        epoch, step, number: the step's position, each from 0; number counts over all epochs.
        weights: the digest of each weight and buffer before the step, by name.
        parts: by call of backward and part of the batch, the name and digest of the batch, of each layer's output in
            the order in which they were computed, and of the loss.
        gradients: the digest of each weight's gradient, added up over all parts, by name.
    """

    epoch: int
    step: int
    number: int
    weights: Mapping[str, str]
    parts: Mapping[tuple[int, int], Sequence[tuple[str, str]]]
    gradients: Mapping[str, str]

    @property
    def place(self) -> str:
        return f"step {self.step + 1} of epoch {self.epoch + 1}"


def read_trace(progress_path: str) -> dict[int, Step]:
    """Return the steps of the trace beside a training's progress file, by number; {} if there is no trace.

    If a step was computed again, after a restart, its last line counts. Incomplete lines are left out.

    Args:
        progress_path: the path or URL of progress.jsonl. The trace is searched for in the same folder.

    Raises:
        InputError: The file is no trace, or cannot be read.
    """
    path = f"{progress_path.rpartition('/')[0] or '.'}/{FILE}"
    file = File(path)
    steps: dict[int, Step] = {}
    if not file.exists():
        return steps
    for text in file.read_on(0).split(b"\n")[:-1]:
        try:
            line = printable(json.loads(text))
        except ValueError:  # an empty line, or one that was cut off
            continue
        try:
            parts = {(one["call"], one["part"]): [*map(tuple, one["outputs"])] for one in line.pop("parts")}
            weights, gradients = (dict(line.pop(name)) for name in ("weights", "gradients"))
            step = Step(weights=weights, parts=parts, gradients=gradients, **line)
        except Exception:  # a line may be anything
            raise InputError(f"{path} is not a trace that this version knows: {text[:100]!r}") from None
        steps[step.number] = step
    return steps


def compare_traces(one: Mapping[int, Step], other: Mapping[int, Step]) -> str:
    """Return a sentence on the first traced step that differs, and on what differs first in this step.

    If all steps that both traces have are equal, or there are no such steps, the sentence says so. If the names of the
    weights differ, it says that the networks do.

    Args:
        one: the steps of one trace by number.
        other: the steps of the other trace.
    """
    both = sorted(one.keys() & other.keys())
    if not both:
        return "There is no traced step that both have: train with the same trace_every"
    before: Step | None = None
    for number in both:
        found = _compare_steps(one[number], other[number], before)
        if found:
            return found
        before = one[number]
    return f"All that is traced is equal in the {len(both)} steps that both have, the last {one[both[-1]].place}"


def _compare_steps(one: Step, other: Step, before: Step | None) -> str:
    """Return a sentence on what differs first between two traces of the same step; "" if all is equal.

    The order is: the names of the weights, the weights before the step, the outputs, the gradients.

    Args:
        one: the step in one trace.
        other: the same step in the other one.
        before: the traced step before, which is equal in both; None if there is none.
    """
    if one.weights.keys() != other.weights.keys():
        names = sorted(one.weights.keys() ^ other.weights.keys())
        return f"The traces are of different networks: only one has the weights {listed(names, MOST_NAMED)}"
    weights = _differing(one.weights, other.weights)
    if weights:
        named = listed(weights, MOST_NAMED)
        if before is None:
            return f"The weights differ already before {one.place}, the first traced step that both have: {named}"
        if one.number == before.number + 1:
            return f"The trainings part in the update after {before.place}, whose gradients are equal: {named}"
        return (
            f"The trainings part between {before.place} and {one.place}: {named}. To find the step and the layer, "
            "train both again with trace_every 1, from the start or, in a task, from a checkpoint before by resume_from"
        )
    found = _first_output(one, other)
    if found:
        return f"The trainings part in {one.place}, whose weights are equal before it: {found}"
    gradients = _differing(one.gradients, other.gradients)
    if gradients:
        names = [name for name, _ in chain.from_iterable(one.parts.values())]
        last_call = {name: index for index, name in enumerate(names)}
        layers = [weight.rpartition(".")[0] or NETWORK for weight in gradients]
        layer = max(layers, key=lambda name: last_call.get(name, -1))
        return (
            f"The trainings part in {one.place}, whose outputs are all equal: the gradient of {layer} differs, and "
            "that of no layer after it in the forward pass"
        )
    return ""


def _first_output(one: Step, other: Step) -> str:
    """Return a text that names the first output that differs between two traces of a step; "" if all are equal.

    Each call of backward and each part of the batch has its own outputs, from the batch to the loss, in the order in
    which they were computed. The text is about the first call of backward with a difference. It names the earliest
    output that differs in any part, and the parts whose first difference it is: "the output of layer1, in part 0, 2 of
    the batch". If the two traces have different parts or calls, the text says so instead.
    """
    if one.parts.keys() != other.parts.keys():
        counts = [f"{len({part for _, part in step.parts})} parts of a batch" for step in (one, other)]
        return f"it has {counts[0]} in one training and {counts[1]} in the other, or other calls of backward"
    differing: dict[tuple[int, int], list[int]] = {}  # parts, by call and index of the first output that differs
    told: dict[tuple[int, int], str] = {}
    for (call, part), outputs in one.parts.items():
        index, found = _first_difference(outputs, other.parts[call, part])
        if found:
            differing.setdefault((call, index), []).append(part)
            told.setdefault((call, index), found)
    if not differing:
        return ""
    first = min(differing)  # of several calls the later ones may differ because of the first
    return f"{told[first]}, in part {', '.join(map(str, differing[first]))} of the batch"


def _first_difference(outputs: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> tuple[int, str]:
    """Return the index of the first output that differs between two traces, and a text that names this output.

    If all are equal, the index is the number of outputs, and the text is "". An output that only one trace has counts
    as different.

    Args:
        outputs: pairs of a layer's name and the digest of its output, in the order of the forward pass.
        others: the same pairs of the other trace.
    """
    for index, (one, other) in enumerate(zip(outputs, others, strict=False)):
        if one[0] != other[0]:
            return index, f"{one[0]} in one training where the other has {other[0]}"
        if one != other:
            return index, one[0] if one[0] in (BATCH, LOSS) else f"the output of {one[0]}"
    if len(outputs) != len(others):
        longer = max(outputs, others, key=len)
        index = min(len(outputs), len(others))
        return index, f"{longer[index][0]}, which only one training computes"
    return len(outputs), ""


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
