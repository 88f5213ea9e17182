"""Frozen dataclasses whose every value is checked, whichever way it came: CLI, UI, file or Python.

A field's checks stand in its declaration: `epochs: int = setting(2, minimum=1)`; without setting(), its type is checked
alone. What fails raises InputError.
"""

import dataclasses
import difflib
import json
import math
from typing import Any, Dict, List, Sequence, Tuple, Type, TypeVar

from dataclasses_json import DataClassJsonMixin

from flyte_ddp.training.errors import InputError

S = TypeVar("S", bound="Settings")

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object"}
BY_NAME = {kind.__name__: kind for kind in TYPE_NAMES}
UNRULED = {"minimum": -math.inf, "above": -math.inf, "maximum": math.inf, "below": math.inf, "choices": ()}


def setting(
    default: Any,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = math.inf,
    below: float = math.inf,
    choices: Sequence[str] = (),
) -> Any:
    """Declares a field: its default, and the range (minimum and maximum included, above and below not) or choices."""
    rules = {"minimum": minimum, "above": above, "maximum": maximum, "below": below, "choices": tuple(choices)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=rules)
    # By a factory, because for Flyte's JSON schema a class is generated and compiled for each plain default: a quarter
    # of a second in all, for a run that may have nothing else to do
    return dataclasses.field(default_factory=lambda: default, metadata=rules)


def read_json(text: str) -> Any:
    """What the text holds; raises InputError for a name that an object has twice, ValueError where it is no JSON."""

    def read_object(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
        refuse_repeated([name for name, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=read_object)


def refuse_repeated(names: Sequence[str]) -> None:
    """Raises InputError for a name that is there twice, of whose values all but the last would be lost."""
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"{_shown(name)} is given twice: leave one of them out")


class Settings(DataClassJsonMixin):
    """Base of Hyperparameters and RunOptions: strict partial JSON in, InputError for whatever breaks a field's rule."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _checked(type(self).__name__, field, getattr(self, field.name)))

    @classmethod
    def from_json(cls: Type[S], s: Any, **_: Any) -> S:
        """Reads a JSON object; missing fields take their defaults."""
        try:
            values = read_json(s)
        except InputError as error:
            raise InputError(f"{cls.__name__}: {error.message}") from None
        except ValueError as error:
            raise InputError(f"{cls.__name__}: not JSON: {error}") from None
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls: Type[S], kvs: Any, **_: Any) -> S:
        """Builds from a mapping; missing fields take their defaults, unknown ones raise InputError."""
        if not isinstance(kvs, dict):
            raise InputError(f"{cls.__name__} must be an object with named fields, got {_shown(kvs)}")
        return cls(**cls.__pre_deserialize__(kvs))

    @classmethod
    def __pre_deserialize__(cls, values: Dict[Any, Any]) -> Dict[Any, Any]:
        """Checks before anything is converted. Flyte's decoder (mashumaro) calls it by this name for inputs from the
        UI, which it would otherwise convert without a word: 2.7 to 2, "false" to True, unknown fields to nothing."""
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name, value in values.items():
            if name not in fields:
                nearest = difflib.get_close_matches(str(name), fields, n=1)
                hint = f" (did you mean {nearest[0]}?)" if nearest else ""
                raise InputError(f"{cls.__name__} has no field {_shown(name)}{hint}; known: {', '.join(fields)}")
            _checked(cls.__name__, fields[name], value)
        return values


def _checked(owner: str, field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Returns the value in the field's own type (1 becomes 1.0 for a float), or raises InputError."""
    name, rules = f"{owner}.{field.name}", {**UNRULED, **field.metadata}
    # from __future__ import annotations leaves the type's name
    expected = BY_NAME.get(field.type, field.type) if isinstance(field.type, str) else field.type
    if expected not in TYPE_NAMES:
        raise InputError(f"{name} must be declared as one of {', '.join(BY_NAME)}, got {_shown(field.type)}")
    if expected is float and type(value) is int:
        value = _as_float(value)
    if expected is int and type(value) is float and value.is_integer():
        value = int(value)  # Flyte's older literals carry every number as a double
    if type(value) is not expected or (expected is float and not math.isfinite(value)):
        raise InputError(f"{name} must be {TYPE_NAMES[expected]}, got {_shown(value)}")  # type: ignore[index]
    if rules["choices"] and value not in rules["choices"]:
        raise InputError(f"{name} must be one of {', '.join(rules['choices'])}, got {_shown(value)}")
    if expected in (int, float):
        within = rules["minimum"] <= value <= rules["maximum"] and rules["above"] < value < rules["below"]
        if not within:
            raise InputError(f"{name} must be {_range(rules)}, got {_shown(value)}")
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _range(rules: Any) -> str:
    words = [
        ("at least {:g}", rules["minimum"]),
        ("above {:g}", rules["above"]),
        ("at most {:g}", rules["maximum"]),
        ("below {:g}", rules["below"]),
    ]
    return " and ".join(text.format(bound) for text, bound in words if math.isfinite(bound))


def _shown(value: Any) -> str:
    """The value as JSON, on one line and never longer than a glance."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
