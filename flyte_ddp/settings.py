"""The inputs of a training: what determines its result, and how to run it. The base of a recipe's own settings.

Frozen dataclasses whose values are always checked, whether they come from the CLI, the UI, a file or Python.

A field's rules are in its declaration: `epochs: int = setting(2, minimum=1)`; without setting(), only its type is
checked. A broken rule raises InputError.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from flyte_ddp.errors import InputError
from flyte_ddp.text import did_you_mean

try:
    from dataclasses_json import DataClassJsonMixin
except ModuleNotFoundError:  # Flyte needs it, training does not

    class DataClassJsonMixin:  # type: ignore[no-redef]
        pass


S = TypeVar("S", bound="Settings")

BACKENDS = ("auto", "gloo", "nccl")
PRECISIONS = ("auto", "float32", "bfloat16")
TRACKING = ("auto", "online", "offline", "tensorboard", "mlflow", "off")
SHARDING = ("off", "full", "hybrid")

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object"}
BY_NAME = {kind.__name__: kind for kind in TYPE_NAMES}


def setting(
    default: Any,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = math.inf,
    below: float = math.inf,
    choices: Sequence[str] = (),
) -> Any:
    """Declares a field: its default, and its range (minimum and maximum inclusive, above and below not) or choices."""
    rules = {"minimum": minimum, "above": above, "maximum": maximum, "below": below, "choices": tuple(choices)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=rules)
    # A factory, because for each plain default Flyte's JSON schema generates and compiles a class: a quarter second in
    # total, for a run that may have nothing else to do
    return dataclasses.field(default_factory=lambda: default, metadata=rules)


def read_json(text: str) -> Any:
    """Parses the text; raises InputError for a name that an object has twice, ValueError if it is not JSON."""

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        refuse_repeated([name for name, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=read_object)


def refuse_repeated(names: Sequence[str]) -> None:
    """Raises InputError for a name that appears twice: all its values but the last would be lost."""
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"{_shown(name)} is given twice: leave one of them out")


class Settings(DataClassJsonMixin):
    """Base of all settings: strict, possibly partial JSON in, InputError for whatever breaks a field's rule."""

    def __post_init__(self) -> None:
        _check_declared(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, checked(type(self).__name__, field, getattr(self, field.name)))

    @classmethod
    def from_json(cls: type[S], s: Any, **_: Any) -> S:
        """Reads a JSON object; missing fields take their defaults."""
        try:
            values = read_json(s)
        except InputError as error:
            raise InputError(f"{cls.__name__}: {error.message}") from None
        except ValueError as error:
            raise InputError(f"{cls.__name__}: not JSON: {error}, got {_shown(s)}") from None
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls: type[S], kvs: Any, **_: Any) -> S:
        """Builds from a mapping; missing fields take their defaults, unknown ones raise InputError."""
        if not isinstance(kvs, dict):
            raise InputError(f"{cls.__name__} must be an object with named fields, got {_shown(kvs)}")
        return cls(**cls.__pre_deserialize__(kvs))

    @classmethod
    def __pre_deserialize__(cls, values: dict[Any, Any]) -> dict[Any, Any]:
        """Checks before anything is converted. Flyte's decoder (mashumaro) calls it by this name for inputs from the
        UI, which it would otherwise convert silently: 2.7 to 2, "false" to True, unknown fields to nothing."""
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name, value in values.items():
            if name not in fields:
                hint = did_you_mean(str(name), fields)
                raise InputError(f"{cls.__name__} has no field {_shown(name)}{hint}; known: {', '.join(fields)}")
            checked(cls.__name__, fields[name], value)
        return values


def _check_declared(kind: type[Settings]) -> None:
    """Raises InputError for what dataclasses leave aside in silence: fields of a class without the decorator, and new
    defaults without a type."""
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for one in kind.__mro__[: kind.__mro__.index(Settings)]:
        types = vars(one).get("__annotations__", {})
        untyped = [name for name in vars(one) if name in known and name not in types]
        is_decorated = "__dataclass_fields__" in vars(one)
        if not is_decorated and (untyped or any("ClassVar" not in str(each) for each in types.values())):
            raise InputError(f"{one.__name__} needs @dataclass(frozen=True), without which its fields have no effect")
        if untyped:
            name = untyped[0]
            example = f"{name}: {getattr(known[name].type, '__name__', known[name].type)} = {vars(one)[name]!r}"
            raise InputError(f"{one.__name__}.{name} must have a type, as in {example}: it has no effect without")


def checked(owner: str, field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Returns the value in the field's own type (1 becomes 1.0 for a float), or raises InputError."""
    name, rules = f"{owner}.{field.name}", {**setting(None).metadata, **field.metadata}
    # with `from __future__ import annotations` it is the type's name
    expected: Any = BY_NAME.get(field.type, field.type) if isinstance(field.type, str) else field.type
    if expected not in TYPE_NAMES:
        raise InputError(f"{name} must be declared as one of {', '.join(BY_NAME)}, got {_shown(field.type)}")
    if expected is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if expected is int and type(value) is float and value.is_integer():
        value = int(value)  # Flyte's older literals carry every number as a double
    if type(value) is not expected or (expected is float and not math.isfinite(value)):
        raise InputError(f"{name} must be {TYPE_NAMES[expected]}, got {_shown(value)}")
    if expected is int and not -(2**63) <= value < 2**63:  # Flyte's cache and literals hold no more
        raise InputError(f"{name} must be a whole number of 64 bits, got {_shown(value)}")
    if expected is dict:
        _check_json(name, value)
    if rules["choices"] and value not in rules["choices"]:
        raise InputError(f"{name} must be one of {', '.join(rules['choices'])}, got {_shown(value)}")
    if expected in (int, float):
        within = rules["minimum"] <= value <= rules["maximum"] and rules["above"] < value < rules["below"]
        if not within:
            raise InputError(f"{name} must be {_range(rules)}, got {_shown(value)}")
    return value


def _check_json(name: str, value: Any) -> None:
    """Raises InputError for what is not the same once it has been JSON, as in inputs of tasks and files of weights."""
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                rule = "must have strings as names, as JSON has no others"
                raise InputError(f'{name} {rule}, got {key!r}: write it as "{key}"')
            _check_json(f"{name}.{key}", inner)
    elif type(value) is list:
        for number, inner in enumerate(value):
            _check_json(f"{name}[{number}]", inner)
    elif not (value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))):
        raise InputError(
            f"{name} must be what JSON keeps as it is, a finite number, a string, true, false, null, a list or an "
            f"object of these, got {_shown(value)} ({type(value).__name__}): convert it"
        )


def _range(rules: Mapping[str, Any]) -> str:
    words = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}
    return " and ".join(f"{text} {rules[name]:g}" for name, text in words.items() if math.isfinite(rules[name]))


def _shown(value: Any) -> str:
    """The value as JSON, on one line and cut to 80 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """What determines the result of any training, and so the cache key; a recipe's own settings derive from it.

    Attributes:
        backend: process group backend; auto is nccl where a GPU is visible, else gloo.
        seed: of the initial weights, the shuffling and the augmentation.
        log_interval: steps between two log lines.
        batch_size: samples of one optimizer step, all ranks together.
        test_batch_size: samples of one evaluation batch, all ranks together.
        epochs: passes over the training samples.
        stop_after: training stops after this many epochs, although its schedule goes on to epochs; 0 is off. It leaves
            final-checkpoint in its logs, from which the same settings with a later stop, or none, continue.
        evaluations_per_epoch: how often an epoch is evaluated, at equal distances, the last time at its end. All that
            happens after an epoch happens after each of them: best weights are chosen, and patience counts them.
        precision: of the forward and backward pass; auto is bfloat16 where all ranks' hardware supports it; a resume
            keeps that of its checkpoint.
        validation_fraction: share of the training samples that are held out, the same ones for any seed, to choose the
            best epoch by; with 0 there is no validation split, and each epoch is evaluated on the test split.
        choose_by: what the best epoch is chosen by: the headline measure or the loss.
        patience: training ends after this many evaluations without an improvement on the validation split; 0 is off.
        minimum_delta: an improvement counts only if it is greater than this.
        freeze: patterns (fnmatch) of the names of layers or parameters that are not trained, separated by commas.
        init_leave_out: patterns like these of the tensors that are not taken from init but initialised anew;
            "mismatching" stands for all that init lacks or has in another shape.
    """

    backend: str = setting("auto", choices=BACKENDS)
    seed: int = setting(1, minimum=0, maximum=2**32 - 1)
    log_interval: int = setting(10, minimum=1)
    batch_size: int = setting(128, minimum=1)
    test_batch_size: int = setting(1000, minimum=1)
    epochs: int = setting(2, minimum=1)
    stop_after: int = setting(0, minimum=0)
    evaluations_per_epoch: int = setting(1, minimum=1)
    precision: str = setting("auto", choices=PRECISIONS)
    validation_fraction: float = setting(0.0, minimum=0, below=1)
    choose_by: str = setting("headline", choices=("headline", "loss"))
    patience: int = setting(0, minimum=0)
    minimum_delta: float = setting(0.0, minimum=0)
    freeze: str = setting("")
    init_leave_out: str = setting("")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_after > self.epochs:
            raise InputError(
                f"{type(self).__name__}.stop_after must be at most epochs ({self.epochs}), got {self.stop_after}: "
                "lower it, or set it to 0 for all of them"
            )

    @property
    def last_epoch(self) -> int:
        """The epoch, from 1, that training ends with, unless early stopping ends it before."""
        return self.stop_after or self.epochs

    def check_validation(self, keep_best: int = 0) -> None:
        """Raises InputError for settings, or an option, that make no sense without a validation split."""
        given = {f"{type(self).__name__}.patience": self.patience, "RunOptions.keep_best": keep_best}
        for name, value in given.items():
            if value:
                raise InputError(
                    f"{name} must be 0 without a validation split, got {value}: set validation_fraction, such as 0.1, "
                    "or has_validation in a recipe that has such a split of its own"
                )


@dataclass(frozen=True)
class RunOptions(Settings):
    """How to run it; the result is the same up to rounding, so the cache ignores these.

    Attributes:
        nproc: ranks to spawn; 0 is one per visible GPU, or two where there is none.
        timeout_seconds: how long the ranks may go without a step before the run counts as hung.
        start_timeout_seconds: the same until their first step, for which they load data and network, resume from a
            checkpoint, and try what could fail later; at least timeout_seconds.
        write_timeout_seconds: the same while they write, or upload, a checkpoint or their results.
        checkpoint_seconds: time between two checkpoints within an epoch (there is always one at its end).
        resume: whether to resume from the checkpoint of an unfinished run of the same training.
        resume_from: the folder of an unfinished run's checkpoint, which its log and its report name, in Flyte's storage
            or on this machine: what was aborted, or ran elsewhere, goes on from there. Refused for another training.
        tracking: online and offline are Weights & Biases; auto is online where it has a key, else off; tensorboard
            writes event files; mlflow sends to the server that MLFLOW_TRACKING_URI names.
        wandb_project: the W&B project; empty is WANDB_PROJECT, else flyte-ddp.
        wandb_entity: the W&B user or team; empty is WANDB_ENTITY, else the key's own.
        mlflow_experiment: the MLflow experiment; empty is MLFLOW_EXPERIMENT_NAME, else flyte-ddp.
        profile: whether torch.profiler records some steps of every rank.
        log_gradients: whether trackers get each parameter's gradient norm and, after each epoch, its histogram.
        keep_checkpoint: whether to keep the last checkpoint, as final-checkpoint, so that a later training can continue
            from it.
        keep_best: how many of the best evaluations on the validation split leave their weights in the logs, the best
            as best-1-epoch-N.pt; 0 is none.
        loader_workers: processes per rank that read ahead samples of a Dataset that are not in memory; with 0 the rank
            reads them itself. Blocks need none: a thread of the rank reads them ahead.
        pin_memory: whether such batches are copied to a GPU from page-locked memory; without a GPU it has no effect.
        cache_bytes: of each node's disk that Blocks of data may take; 0 is half of what is free.
        sharding: with full, each rank keeps a part of the weights, gradients and optimizer state, and the layers that
            Recipe.shard names are made whole one after the other; for models that are too large for one GPU. With
            hybrid, it shares them with the ranks of its node alone, and each node has a copy.
        compile: whether torch.compile compiles, one by one, the layers that Recipe.shard names, or else the network;
            for GPUs.
    """

    nproc: int = setting(0, minimum=0, maximum=1024)
    timeout_seconds: float = setting(300.0, minimum=1, maximum=86400)
    start_timeout_seconds: float = setting(1800.0, minimum=1, maximum=86400)
    write_timeout_seconds: float = setting(1800.0, minimum=1, maximum=86400)
    checkpoint_seconds: float = setting(30.0, minimum=0)
    resume: bool = setting(True)
    resume_from: str = setting("")
    tracking: str = setting("auto", choices=TRACKING)
    wandb_project: str = setting("")
    wandb_entity: str = setting("")
    mlflow_experiment: str = setting("")
    profile: bool = setting(False)
    log_gradients: bool = setting(False)
    loader_workers: int = setting(2, minimum=0, maximum=64)
    pin_memory: bool = setting(True)
    keep_checkpoint: bool = setting(False)
    keep_best: int = setting(0, minimum=0)
    cache_bytes: int = setting(0, minimum=0)
    sharding: str = setting("off", choices=SHARDING)
    compile: bool = setting(False)
