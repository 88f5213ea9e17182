"""The start of a training from earlier weights, its continuation from a checkpoint, and the freezing of layers."""

import fnmatch
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flyte_ddp.engine.checkpoints.checkpoint import compare_identities, read_checkpoint, restore
from flyte_ddp.engine.checkpoints.resume import OTHER_BASE, copy_in_place
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import is_batch_norm
from flyte_ddp.errors import CheckpointError, InputError
from flyte_ddp.model_files.frozen_base import add_module_versions, frozen_weights
from flyte_ddp.model_files.weights import add_frozen_weights, describe_misfits, misfits, read_weights, with_tied
from flyte_ddp.text import listed

MISMATCHING = "mismatching"
# These may change within an epoch. The rest determines which samples remain, or what the sums so far mean
FREE_WITHIN_EPOCH = {
    ("code",), ("init",),
    *(("settings", name) for name in (
        "backend", "choose_by", "epochs", "log_interval", "minimum_delta", "patience", "stop_after",
    )),
}  # fmt: skip
NEW_WITH_EPOCH = ("names", "sums", "told")  # parts of the progress that begin anew with each epoch
JUDGED_ON = {("data",), ("settings", "validation_fraction")}  # these decide on which samples epochs are compared


def is_checkpoint(path: Path) -> bool:
    """Return whether a file is a checkpoint of this package, of any version. Its checksum is not verified.

    A file of weights alone, the manifest of a sharded checkpoint, and a file that torch cannot load give False.

    Raises:
        InputError: The file is missing or may not be read.
    """
    content = _open(path)
    return isinstance(content, dict) and isinstance(content.get("format"), int)


def names_in_checkpoint(path: Path) -> set[str]:
    """Return the names of the network's tensors that a checkpoint has; none if this version cannot read its format."""
    state = _open(path).get("state")
    weights = state.get("model") if isinstance(state, dict) else None
    return {*weights} if isinstance(weights, dict) else set()


def _open(path: Path) -> Any:
    """Load a file with torch, and return its content, with mapped tensors; None if torch cannot load it.

    Raises:
        InputError: The file is missing or may not be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise InputError(f"init cannot be read: {path}: {error.strerror}") from None
    except Exception:  # of many types: no checkpoint, so whoever reads the weights says what is wrong with them
        return None


def load_init_weights(model: nn.Module, path: Path, leave_out: str) -> tuple[set[str], str]:
    """Load a file's weights into the network. Tensors that leave_out names keep their initial values.

    After an error, the network is as before.

    Args:
        model: the network, which is changed.
        path: the file: a model_state or a checkpoint.
        leave_out: patterns (fnmatch) of names of tensors or layers, separated by commas. The word "mismatching" among
            them leaves out each tensor that only the file or only the network has, or whose shape differs.

    Returns:
        The names of the loaded tensors that the file has; and a remark for the user. The remark also counts tensors
        that the file lacks: other names of a tied weight, and frozen weights.

    Raises:
        InputError: The file cannot be read, weights do not fit the network, a pattern matches nothing, or no weight is
            left to load.
    """
    inside = read_weights(path, "init", "use a model_state or checkpoint of a training")
    own = model.state_dict()
    patterns = split_patterns(leave_out)
    weights = add_frozen_weights(with_tied(inside, own), model, path, "init")
    named = [pattern for pattern in patterns if pattern != MISMATCHING]
    left_out = matching("init_leave_out", named, sorted({*own, *weights}))
    unfit = [name for name in misfits(weights, own) if name not in left_out]
    if unfit and MISMATCHING not in patterns:
        layer = unfit[0].rpartition(".")[0] or unfit[0]
        remedy = f'to leave such tensors out, set init_leave_out to their names, as "{layer}", or to "{MISMATCHING}"'
        if own.keys().isdisjoint(weights):
            remedy = "rename its tensors, before which a wrapper may have put a prefix"
        raise InputError(
            f"init must fit the network, got {path} with {describe_misfits(unfit, weights, own)}: {remedy}"
        )
    taken = {name: value for name, value in weights.items() if name not in {*left_out, *unfit}}
    if not taken:
        raise InputError(f"init_leave_out must leave some tensors of init ({path}), got {leave_out!r}: name fewer")
    model.load_state_dict(add_module_versions(taken, model), strict=False)
    new = [name for name in own if name not in taken]
    rest = f"; newly initialised: {listed(new)}" if new else ""
    return {*taken} & {*inside}, f"Starts from {len(taken)} of {len(own)} tensors of {path.name}{rest}"


def load_init_checkpoint(state: TrainingState, path: Path, job: Job, steps_per_epoch: int) -> str:
    """Load another training's checkpoint, to continue it with this training's settings.

    The weights, the optimizer's state and the position in the training come from the checkpoint. The optimizer's
    hyperparameters, the learning rates and the schedule are this training's own. The best epoch so far is forgotten if
    this training chooses the best by another measure or on other samples. On other samples, the losses so far are
    forgotten, too, but not the warnings. Each rank reads the file by itself.

    Args:
        state: the state of this training, which is overwritten.
        path: the checkpoint's file.
        job: this training's recipe, settings and identity.
        steps_per_epoch: the number of steps of this training's epochs.

    Returns:
        A sentence for the user: after which epoch, or at which step of which epoch, the training continues, and whether
        the best epoch so far was forgotten.

    Raises:
        CheckpointError: The file is damaged, of another format or recipe, or its network had other frozen weights from
            model(), which checkpoints leave out.
        InputError: The network or the optimizer differs, no epoch is left to train, or init_leave_out is set and
            differs from the other training's. A checkpoint from within an epoch also needs the same measures, settings
            and data.
        RecoverableError: The file cannot be read now.
    """
    content = read_checkpoint(path, {"recipe": job.recipe})
    saved, other_identity = content["state"], content["identity"]
    progress = saved["progress"]
    fresh = state.state_dict()
    epoch, step = progress["epoch"], progress["step"]
    _check_settings(epoch, step, other_identity, job)
    if step and progress["names"] != [*state.names]:
        raise InputError(
            f"init is a checkpoint from within an epoch, which needs the same measures: it has "
            f"{', '.join(progress['names'])}, and this training {', '.join(state.names)}: continue from the end of an "
            "epoch, or let measure() return the same"
        )
    position = epoch * steps_per_epoch + step
    if saved["base"] != state.base.digest:
        raise CheckpointError(OTHER_BASE)
    if unfit := misfits(saved["model"], fresh["model"]):
        problem = describe_misfits(unfit, saved["model"], fresh["model"])
        raise InputError(
            f"init must fit the network, got {path} with {problem}: use a checkpoint of a training of this network"
        )
    if _has_other_samples(other_identity, job.identity):
        watch = {**fresh["progress"]["watch"], "warnings": progress["watch"]["warnings"]}
        progress = {**progress, "watch": watch}
    bases = zip(state.schedule.base_lrs, state.schedule.lr_lambdas, strict=True)
    rates = [float(base * factor(position)) for base, factor in bases]
    frozen = {name: saved["model"][name] for name in frozen_weights(state.model) if name in saved["model"]}
    continued = {
        **saved,
        "average": {**(saved["average"] or saved["model"]), **frozen},  # it shares what is frozen with the network
        "optimizer": _merge_optimizer_states(state.optimizer, saved["optimizer"], rates),
        "schedule": {**fresh["schedule"], "last_epoch": position, "_step_count": position + 1, "_last_lr": rates},
        "progress": progress if step else {**progress, **{name: fresh["progress"][name] for name in NEW_WITH_EPOCH}},
        "choice": saved["choice"] or fresh["choice"],
        "spikes": fresh["spikes"] if saved["spikes"] is None else saved["spikes"],
    }
    restore(state, copy_in_place(state, continued))
    _judge_best(state, fresh["choice"], other_identity, job.identity)
    where = f"at epoch {epoch + 1}, step {step + 1}" if step else f"after epoch {epoch}"
    if state.best_tracker and state.best_tracker.best < continued["choice"]["best"]:
        where += ": the best epoch so far is forgotten, because it was chosen by another measure or on other samples"
    return f"Continues from {path.name}, {where}"


def _check_settings(epoch: int, step: int, other_identity: dict[str, Any], job: Job) -> None:
    """Check that a training can continue from a checkpoint of another training.

    Args:
        epoch: the number of complete epochs in the checkpoint.
        step: the number of steps of the next epoch in the checkpoint; 0 if it was written between epochs.
        other_identity: what determines the other training's result.
        job: the training that begins.

    Raises:
        InputError: No epoch is left to train; or init_leave_out is set, and differs from the other training's; or
            `step` is above 0, and the settings or data differ in something that must not change within an epoch.
    """
    settings = job.settings
    left_out = settings.init_leave_out
    if left_out and left_out != other_identity["settings"].get("init_leave_out"):
        raise InputError(
            f"init_leave_out must be empty where init is a checkpoint, from which training continues with all tensors, "
            f"got {left_out!r}: start from its model_state"
        )
    if epoch >= settings.last_epoch:
        name = "stop_after" if settings.stop_after else "epochs"
        raise InputError(
            f"{name} must be above {epoch}, because it includes the epochs of init, got {settings.last_epoch}: raise it"
        )
    differing = [
        path[-1] for path, *_ in compare_identities(other_identity, job.identity) if path not in FREE_WITHIN_EPOCH
    ]
    if step and differing:
        raise InputError(
            "init is a checkpoint from within an epoch, which needs the same settings and data, but these differ: "
            f"{', '.join(differing)}"
        )


def _judge_best(state: TrainingState, fresh: Any, other_identity: dict[str, Any], ours: dict[str, Any]) -> None:
    """Decide whether the best epoch of the other training still counts, and whether patience begins anew.

    - The training has no best_tracker: nothing happens.
    - The data or validation_fraction differ: the best epoch no longer counts, and the best_tracker is reset.
    - The other training ended because patience ran out, and had no stop_after: patience begins anew.
    - In any other case, what the best_tracker has loaded stays.

    Args:
        state: the training that begins, which has loaded the other one's state.
        fresh: the state dict of a best_tracker that has seen no epoch.
        other_identity: what determines the other training's result.
        ours: what determines this training's result.
    """
    if not state.best_tracker:
        return
    if _has_other_samples(other_identity, ours):
        state.best_tracker.load_state_dict(fresh)
    elif state.best_tracker.is_over and not other_identity["settings"].get("stop_after"):  # patience ended the training
        state.best_tracker.waited = 0


def _has_other_samples(other_identity: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Return whether the data or the validation_fraction of two trainings differ, by their identities."""
    return any(path in JUDGED_ON for path, *_ in compare_identities(other_identity, ours))


def freeze(model: nn.Module, patterns: str) -> str:
    """Freeze the parameters whose name, or whose layer's name, matches a pattern; return a remark with their names.

    A batch norm layer keeps its running statistics if all its parameters are frozen, by a pattern or before. A batch
    norm layer without parameters does so if a pattern matches its name, or that of a layer around it. A hook sets these
    layers to evaluation mode before each forward pass.

    Args:
        model: the network, which is changed.
        patterns: patterns (fnmatch) of names, separated by commas.

    Raises:
        InputError: A pattern matches no parameter.
    """
    named = split_patterns(patterns)
    names = matching("freeze", named, [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    for name, layer in model.named_modules():
        if not is_batch_norm(layer):
            continue
        weights = list(layer.parameters(recurse=False))
        is_frozen = not any(weight.requires_grad for weight in weights)
        if not weights:
            is_frozen = any(_matches(name, pattern) for pattern in named)
        if is_frozen:
            layer.register_forward_pre_hook(_keep_statistics)
    return f"Frozen: {listed(names)}"


def _keep_statistics(layer: nn.Module, _: Any) -> None:
    layer.eval()  # a hook does it before each forward pass, because each epoch begins with train()


def matching(setting: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match a pattern themselves, or that belong to a layer whose name matches a pattern.

    Args:
        setting: the setting that has the patterns, for the error message.
        patterns: the patterns (fnmatch, case-sensitive).
        names: names of tensors, such as "layer1.0.weight". The result keeps their order.

    Raises:
        InputError: A pattern matches none of the names.
    """
    matched = []
    for pattern in patterns:
        matches = [name for name in names if _matches(name, pattern)]
        if not matches:
            raise InputError(f"{setting} must match names of tensors, got {pattern!r}: choose from {listed(names)}")
        matched += matches
    return [name for name in names if name in matched]


def split_patterns(text: str) -> list[str]:
    """Split patterns at commas and white space."""
    return [pattern for pattern in re.split(r"[\s,]+", text) if pattern]


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name, or that of a layer that it is in: a.b.c, a.b or a for a.b.c."""
    parts = name.split(".")
    layers = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return any(fnmatch.fnmatchcase(layer, pattern) for layer in layers)


def _merge_optimizer_states(optimizer: Optimizer, saved: dict[str, Any], rates: Sequence[float]) -> dict[str, Any]:
    """Merge another training's optimizer state with this training's hyperparameters, and return a state dict.

    The state, such as Adam's moments, comes from `saved`, and is not copied. Hyperparameters come from `optimizer`: the
    options of a group that its class, or a base class, takes as arguments. A group's other options count as state.

    Args:
        optimizer: this training's optimizer, which is not changed.
        saved: the state dict of the other training's optimizer.
        rates: the learning rate of each group, which replaces both optimizers' own.

    Raises:
        InputError: The two have different numbers of groups, or groups with different numbers of parameters or
            different names of options.
    """

    def shape(state: dict[str, Any]) -> list[tuple[list[str], int]]:
        return [(sorted(group), len(group["params"])) for group in state["param_groups"]]

    fresh = optimizer.state_dict()
    if shape(fresh) != shape(saved):
        raise InputError(
            "init must have the same optimizer with the same parameter groups, got others: start from its model_state"
        )
    own = {name for kind in type(optimizer).__mro__ for name in inspect.signature(kind).parameters}
    own.add("initial_lr")  # which a schedule of torch adds
    groups = [
        {**before, **{name: value for name, value in group.items() if name in own}, "lr": rate}
        for group, before, rate in zip(fresh["param_groups"], saved["param_groups"], rates, strict=True)
    ]
    return {**saved, "param_groups": groups}
