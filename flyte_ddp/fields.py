"""Dataclasses whose values are always checked, whether they come from the CLI, the UI, a file or Python.

A field declares its rules and its help, as in `epochs: int = setting(2, minimum=1, help="passes over the samples")`.
Without setting(), only the field's type is checked. A broken rule raises InputError.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from flyte_ddp.errors import InputError
from flyte_ddp.text import did_you_mean

try:
    from dataclasses_json import DataClassJsonMixin
except ModuleNotFoundError:  # Flyte needs dataclasses_json, training does not

    class DataClassJsonMixin:  # type: ignore[no-redef]
        pass


S = TypeVar("S", bound="Settings")

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object"}
TYPES = {kind.__name__: kind for kind in TYPE_NAMES}


def setting(
    default: Any,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = math.inf,
    below: float = math.inf,
    choices: Sequence[str] = (),
    help: str = "",
) -> Any:
    """Declare a field of a settings class, with its default, its rules and its help.

    Use it in place of dataclasses.field(). The rules are stored in the field's metadata, and the settings class checks
    them when it is constructed.

    Args:
        default: the value of a field that is left out. Each instance gets its own shallow copy of a dict. Any other
            value is shared by all instances, so do not pass a list.
        minimum: the smallest number allowed.
        above: a limit that a number must exceed.
        maximum: the largest number allowed.
        below: a limit that a number must stay under.
        choices: the strings that are allowed; empty allows all.
        help: what the field means, for commands' --help and the API's page. The text counts as code: for Flyte's cache,
            another text is a new version of each recipe that imports the class.
    """
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    rules = {**limits, "choices": tuple(choices), "help": help}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=rules)
    # Flyte's JSON schema generates and compiles a class for each plain default. That takes a quarter of a second in
    # total, and a factory avoids it.
    return dataclasses.field(default_factory=lambda: default, metadata=rules)


def read_json(text: str) -> Any:
    """Parse JSON text and return the value.

    NaN, Infinity and -Infinity, which are not JSON, are accepted and become floats.

    Raises:
        InputError: an object has a name twice.
        ValueError: the text is not JSON, or is nested too deeply.
    """

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        refuse_repeated([name for name, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=read_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def plain(value: Any) -> Any:
    """Return the value as strict JSON: NaN and infinity become null."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse_repeated(names: Sequence[str]) -> None:
    """Raise InputError for a name that appears twice: JSON and YAML would silently keep its last value alone."""
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"{_shown(name)} is given twice: leave one of them out")


class Settings(DataClassJsonMixin):
    """The base of all settings: frozen dataclasses that check each value when they are made, and read strict JSON.

    A broken rule raises InputError.

    Attributes:
        refused: names of inherited fields that have no effect in this class. No message lists or suggests them.
    """

    refused: ClassVar[Collection[str]] = ()

    @classmethod
    def hint(cls, name: str) -> str:
        """Return what to add to the message about a name that is no field: " (did you mean epochs?)", or ""."""
        return did_you_mean(name, {field.name for field in dataclasses.fields(cls)} - {*cls.refused})  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        _check_declaration(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _check_own(type(self), field, getattr(self, field.name)))

    @classmethod
    def from_json(cls: type[S], s: Any, **_: Any) -> S:
        """Build settings from the text of a JSON object. Missing fields take their defaults.

        Args:
            s: the text.
            _: accepted and ignored, as dataclasses_json passes options.

        Raises:
            InputError: The text is not a JSON object, has an unknown or repeated name, or lacks a field that has no
                default. Or a value breaks its field's rules.
        """
        try:
            values = read_json(s)
        except InputError as error:
            raise InputError(f"{cls.__name__}: {error.message}") from None
        except ValueError as error:
            raise InputError(f"{cls.__name__}: not JSON: {error}, got {_shown(s)}") from None
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls: type[S], kvs: Any, **_: Any) -> S:
        """Build settings from a mapping. Missing fields take their defaults; unknown ones raise InputError."""
        if not isinstance(kvs, dict):
            raise InputError(f"{cls.__name__} must be an object with named fields, got {_shown(kvs)}")
        return cls(**cls.__pre_deserialize__(kvs))

    @classmethod
    def __pre_deserialize__(cls, values: dict[Any, Any]) -> dict[Any, Any]:
        """Check the values before Flyte converts them, and return them as they are.

        Flyte's decoder (mashumaro) calls this method by its name for inputs from the UI. Otherwise the decoder would
        convert them silently: 2.7 to 2, "false" to True, and unknown fields to nothing.

        Raises:
            InputError: A value breaks a rule, its name is no field, or a field without a default has no value.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name, value in values.items():
            if name not in fields:
                known = ", ".join(one for one in fields if one not in cls.refused)
                raise InputError(f"{cls.__name__} has no field {_shown(name)}{cls.hint(str(name))}; known: {known}")
            _check_own(cls, fields[name], value)
        for name, field in fields.items():
            if name not in values and find_default(field) is dataclasses.MISSING:
                raise InputError(f"{cls.__name__}.{name} must be given, as it has no default: add it")
        return values


def find_type(field: "dataclasses.Field[Any]") -> Any:
    """Return the type of a field's values."""
    # With `from __future__ import annotations`, a field's type is the name of the type
    return TYPES.get(field.type, field.type) if isinstance(field.type, str) else field.type


def find_default(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, unchecked; dataclasses.MISSING if the field has none."""
    return field.default_factory() if callable(field.default_factory) else field.default


def is_field(kind: type[Settings], name: str) -> bool:
    """Return whether the settings class has a field of this name that is not refused."""
    return name in {field.name for field in dataclasses.fields(kind)} - {*kind.refused}  # type: ignore[arg-type]


@functools.cache
def _find_rules(kind: type, name: str) -> Mapping[str, Any]:
    """Return a field's rules by name, such as "minimum", from the nearest class that declares the field by setting().

    A new default alone, as in `epochs: int = 30`, leaves the rules as they are.
    """
    declared = (vars(base).get("__dataclass_fields__", {}).get(name) for base in kind.__mro__)
    return next((field.metadata for field in declared if field and "minimum" in field.metadata), setting(None).metadata)


def describe_fields(kind: type[Settings]) -> dict[str, str]:
    """Return a text for each field, by the field's name: its help, and its default as in "[default: 0.1]".

    A field that a subclass declares without help has the help of the base class. An empty string as default is not
    shown. A field without a default is "[required]".
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for name, field in vars(base).get("__dataclass_fields__", {}).items():
            texts[name] = field.metadata.get("help") or texts.get(name, "")
    described = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        default = find_default(field)
        shown = "[required]"
        if default is not dataclasses.MISSING:
            shown = f"[default: {json.dumps(_check_own(kind, field, default))}]" if default != "" else ""
        described[field.name] = f"{texts.get(field.name, '')} {shown}".strip()
    return described


def _check_declaration(kind: type[Settings]) -> None:
    """Raise InputError if dataclasses would ignore a field that a settings class, or one of its bases, declares.

    That happens if a class declares fields without the decorator @dataclass(frozen=True), or gives a field a new
    default without repeating the field's type.
    """
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


def _check_own(kind: type[Settings], field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Check a value by the rules that a settings class or its bases declare. Returns and raises as check_value does."""
    return check_value(kind.__name__, field, value, _find_rules(kind, field.name))


def check_value(owner: str, field: "dataclasses.Field[Any]", value: Any, rules: Mapping[str, Any]) -> Any:
    """Check a value by its field's type and rules, and return the value in the field's type.

    For a float, 1 becomes 1.0. For an int, 2.0 becomes 2. Nothing else is converted.

    Args:
        owner: the name of the settings class, for messages.
        field: the field.
        value: the value to check.
        rules: the field's rules, as setting() stores them: minimum, above, maximum, below and choices.

    Raises:
        InputError: The value has another type, breaks a rule, is not finite, or needs more than 64 bits. Or it is a
            dict that JSON would change. Or settings cannot have fields of this type.
    """
    name = f"{owner}.{field.name}"
    expected = find_type(field)
    if expected not in TYPE_NAMES:
        raise InputError(f"{name} must be declared as one of {', '.join(TYPES)}, got {_shown(field.type)}")
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
            raise InputError(f"{name} must be {_describe_range(rules)}, got {_shown(value)}")
    return value


def _check_json(name: str, value: Any) -> None:
    """Raise InputError if a value, or one within it, would change when it is written as JSON and read again.

    Args:
        name: what the message calls the value, such as Sweep.values.
        value: the value.
    """
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


def _describe_range(rules: Mapping[str, Any]) -> str:
    """Return the limits of a number in words: "at least 0 and below 1"."""
    words = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}
    values = {name: rules[name] for name in words if math.isfinite(rules[name])}
    # :g would round a limit that is a whole number, as in 4.29497e+09
    texts = {name: str(value) if type(value) is int else f"{value:g}" for name, value in values.items()}
    return " and ".join(f"{words[name]} {text}" for name, text in texts.items())


def _shown(value: Any) -> str:
    """Return the value as JSON, on one line and cut to 80 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
