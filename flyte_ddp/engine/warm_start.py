"""How a training begins: with the weights of an earlier one, where an earlier one has ended, with layers that stay."""

import fnmatch
import re
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from torch import nn

from flyte_ddp.engine.checkpoint import DIGEST_BYTES, read_checkpoint
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.layers import BatchNorm
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.errors import CheckpointError, InputError
from flyte_ddp.weights import listed, misfits, read_weights, told

ZIP = b"PK\x03\x04"  # how a file of torch.save begins
MISMATCHING = "mismatching"
# What may be another within an epoch: the rest decides which samples are left of it, or what the sums so far mean
FREE_WITHIN_EPOCH = (
    "backend", "choose_by", "code", "epochs", "init", "log_interval", "minimum_delta", "patience", "stop_after",
)  # fmt: skip


def is_checkpoint(path: Path) -> bool:
    """Whether the file is a checkpoint, rather than weights alone; InputError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(DIGEST_BYTES + len(ZIP))[DIGEST_BYTES:] == ZIP
    except OSError as error:
        raise InputError(f"init cannot be read: {path}: {error.strerror}") from None


def begin_with(model: nn.Module, path: Path, leave_out: str) -> str:
    """Puts a model_state's weights into the network, but for those that leave_out says; a sentence on what was done.

    InputError where the others are not those of the network, by name and shape.
    """
    given = read_weights(path, "init", "give a model_state, or a checkpoint that a training has left")
    own, patterns = model.state_dict(), patterns_of(leave_out)
    named = [pattern for pattern in patterns if pattern != MISMATCHING]
    left_out = matching("init_leave_out", named, sorted({*own, *given}))
    odd = [name for name in misfits(given, own) if name not in left_out]
    if odd and MISMATCHING not in patterns:
        raise InputError(
            f"init must fit the network, and {path} {told(odd, given, own)}: to begin anew with such tensors, name "
            f'them in init_leave_out, as "{odd[0].rpartition(".")[0] or odd[0]}", or set it to "{MISMATCHING}"'
        )
    taken = {name: value for name, value in given.items() if name not in {*left_out, *odd}}
    if not taken:
        raise InputError(f"init_leave_out leaves nothing of init ({path}) to begin with, got {leave_out!r}")
    model.load_state_dict(taken, strict=False)
    anew = [name for name in own if name not in taken]
    rest = f"; begin anew: {listed(anew)}" if anew else ""
    return f"Begins with {len(taken)} of {len(own)} tensors of {path.name}{rest}"


def train_on(state: TrainingState, path: Path, job: Job, steps_per_epoch: int) -> str:
    """Puts the training where another one's checkpoint is, to go on by its own settings; a sentence on what was done.

    The optimizer's memory is the other's, its rates and the schedule are this training's own. InputError where this
    training cannot be a continuation of the other.
    """
    try:
        content = read_checkpoint(path, {"recipe": job.identity.recipe})
    except CheckpointError as error:
        raise InputError(f"init: the checkpoint {path} {error}") from None
    saved, theirs, ours = content["state"], content["identity"], job.identity.as_dict()
    settings = job.identity.settings
    if saved["epoch"] >= settings.last_epoch:
        name = "stop_after" if settings.stop_after else "epochs"
        raise InputError(
            f"{name} must be above {saved['epoch']}, which init has behind it and which count, got "
            f"{settings.last_epoch}"
        )
    differing = [name for name in ours if name not in FREE_WITHIN_EPOCH and theirs.get(name) != ours[name]]
    if saved["step"] and differing:
        raise InputError(
            "init is a checkpoint from within an epoch, which goes on with the same settings and data alone, but other "
            f"are {', '.join(differing)}"
        )
    fresh, position = state.state_dict(), saved["epoch"] * steps_per_epoch + saved["step"]
    if odd := misfits(saved["model"], fresh["model"]):
        raise InputError(
            f"init must fit the network, and {path} {told(odd, saved['model'], fresh['model'])}: give a checkpoint of "
            "a training of this network"
        )
    bases = zip(state.schedule.base_lrs, state.schedule.lr_lambdas, strict=True)
    rates = [float(base * factor(position)) for base, factor in bases]
    state.load_state_dict(
        {
            **saved,
            "average": saved["average"] or saved["model"],
            "optimizer": _optimizer(fresh["optimizer"], saved["optimizer"], rates),
            "schedule": {**fresh["schedule"], "last_epoch": position, "_step_count": position + 1, "_last_lr": rates},
            "sums": saved["sums"] if saved["step"] else fresh["sums"],
            "choice": saved["choice"] or fresh["choice"],
        }
    )
    if state.choice:
        same = all(theirs.get(name) == ours[name] for name in ("choose_by", "data", "validation_fraction"))
        if not same:  # what was the best by another measure, or on other samples, says nothing here
            state.choice.load_state_dict(fresh["choice"])
        elif state.choice.is_over and not theirs.get("stop_after"):  # which was cut, not ended, to go on as it was
            state.choice.waited = 0
    where = f"epoch {saved['epoch'] + 1}, step {saved['step'] + 1}" if saved["step"] else f"epoch {saved['epoch']}"
    return f"Goes on where {path.name} {'stands' if saved['step'] else 'ended'}: {where}"


def freeze(model: nn.Module, patterns: str) -> str:
    """Has the parameters of these names, or of layers of these names, stay as they are; says which.

    So do the running statistics of a batch norm all of whose parameters do.
    """
    names = matching("freeze", patterns_of(patterns), [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, BatchNorm):
            layer.is_frozen = bool(names) and layer.affine and not any(p.requires_grad for p in layer.parameters())
    return f"Frozen: {listed(names)}"


def matching(setting: str, patterns: Sequence[str], names: Sequence[str]) -> List[str]:
    """The names that one of the patterns fits, in whole or as that of a layer that they belong to; InputError for a
    pattern that fits none."""
    found = []
    for pattern in patterns:
        fitting = [name for name in names if any(fnmatch.fnmatchcase(part, pattern) for part in _layers(name))]
        if not fitting:
            raise InputError(f"{setting}: no tensor is called {pattern!r}; there are {listed(names)}")
        found += fitting
    return [name for name in names if name in found]


def patterns_of(text: str) -> List[str]:
    return [pattern for pattern in re.split(r"[\s,]+", text) if pattern]


def _layers(name: str) -> List[str]:
    """a.b.c: itself, a.b and a."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _optimizer(fresh: Dict[str, Any], saved: Dict[str, Any], rates: Sequence[float]) -> Dict[str, Any]:
    """The saved memory of each parameter, beside the momentum and the like that are wished for now."""

    def shape(state: Dict[str, Any]) -> List[Tuple[List[str], int]]:
        return [(sorted(group), len(group["params"])) for group in state["param_groups"]]

    if shape(fresh) != shape(saved):
        raise InputError(
            "init: its optimizer is another, or has other groups of parameters: begin with its model_state"
        )
    groups = [{**group, "lr": rate} for group, rate in zip(fresh["param_groups"], rates, strict=True)]
    return {"state": saved["state"], "param_groups": groups}
