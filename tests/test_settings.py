"""Every wrong input gets one clear answer, whichever way it comes."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgpack
import numpy as np
import pytest
import yaml
from flytekit.core.type_engine import _default_msgpack_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from mashumaro.codecs.json import JSONDecoder
from mashumaro.codecs.msgpack import MessagePackDecoder

from flyte_ddp.attempt.options import _hint
from flyte_ddp.errors import InputError
from flyte_ddp.fields import describe_fields, setting
from flyte_ddp.reading import read_settings
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions, TrainingSettings

WRONG = [
    ('{"epochz": 2}', ['no field "epochz"', "did you mean epochs?", "batch_size"]),
    ('{"nproc": 2}', ['no field "nproc" (RunOptions has it)']),
    ('{"epochs": "two"}', ["epochs", '"two"', "a whole number"]),
    ('{"epochs": 2.7}', ["epochs", "2.7", "a whole number"]),
    ('{"epochs": true}', ["epochs", "true", "a whole number"]),
    ('{"epochs": null}', ["epochs", "null", "a whole number"]),
    ('{"nesterov": "false"}', ["nesterov", '"false"', "true or false"]),
    ('{"learning_rate": NaN}', ["learning_rate", "NaN", "a number"]),
    ('{"learning_rate": Infinity}', ["learning_rate", "Infinity", "a number"]),
    ('{"learning_rate": 1e999}', ["learning_rate", "a number"]),
    ('{"epochs": 0}', ["epochs", "at least 1", "got 0"]),
    ('{"stop_after": 3}', ["stop_after", "at most epochs (2)", "got 3"]),
    ('{"batch_size": -1}', ["batch_size", "at least 1", "got -1"]),
    ('{"seed": 4294968000}', ["seed", "at least 0 and at most 4294967295", "got 4294968000"]),
    ('{"learning_rate": 0}', ["learning_rate", "above 0", "got 0"]),
    ('{"sgd_momentum": 1.5}', ["sgd_momentum", "at least 0 and below 1", "got 1.5"]),
    ('{"backend": "mpi"}', ["backend", "auto, gloo, nccl", '"mpi"']),
    ('{"dataset": "imagenet"}', ["dataset", "fashion_mnist", '"imagenet"']),
    ('{"schedule": "cosine"}', ["schedule", "onecycle, constant", '"cosine"']),
    ("[1, 2]", ["object with named fields", "[1, 2]"]),
    ("3", ["object with named fields", "3"]),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_input_is_answered_with_field_value_and_rule(text, words):
    with pytest.raises(InputError) as refused:
        Hyperparameters.from_json(text)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(("text", "words"), [row for row in WRONG if row[0].startswith("{")])
def test_the_ui_and_python_callers_meet_the_same_checks(text, words):
    values = json.loads(text)
    for decode in (
        lambda: JSONDecoder(Hyperparameters).decode(text),
        lambda: MessagePackDecoder(Hyperparameters, pre_decoder_func=_default_msgpack_decoder).decode(
            msgpack.dumps(values)
        ),
        lambda: Hyperparameters.from_dict(values),
    ):
        with pytest.raises(ValueError, match=r"Hyperparameters") as refused:
            decode()
        assert all(word in str(refused.value) for word in words)
    if not {"epochz", "nproc"} & {*values}:
        with pytest.raises(InputError):
            Hyperparameters(**values)


def test_a_new_default_leaves_rules_and_help_of_its_field_and_setting_replaces_the_rules():
    @dataclass(frozen=True)
    class Small(TrainingSettings):
        batch_size: int = 8
        precision: str = "fp32"

    with pytest.raises(InputError, match=r"Small\.precision must be one of auto, .*, got \"fp32\""):
        Small()
    assert Small(precision="float32").batch_size == 8
    with pytest.raises(InputError, match=r"Small\.batch_size must be at least 1, got 0"):
        Small.from_json('{"batch_size": 0, "precision": "auto"}')

    @dataclass(frozen=True)
    class Smaller(Small):
        batch_size: int = setting(0)
        precision: str = "float32"

    assert (Smaller().batch_size, Smaller.from_json("{}").precision) == (0, "float32")
    assert describe_fields(Smaller)["batch_size"] == "samples of one optimizer step, all ranks together. [default: 0]"


@dataclass(frozen=True, kw_only=True)
class Required(TrainingSettings):
    width: int = setting(8, help="of the hidden layer.")
    depth: int
    name: str


def test_a_field_without_a_default_must_be_given():
    for read in (Required.from_json, JSONDecoder(Required).decode):
        with pytest.raises(ValueError, match=r"Required\.depth must be given, as it has no default"):
            read('{"name": "mine"}')
    assert Required.from_json('{"name": "", "depth": 3}').depth == 3
    described = describe_fields(Required)
    assert [described[name] for name in ("width", "depth", "name")] == [
        "of the hidden layer. [default: 8]", "[required]", "[required]",
    ]  # fmt: skip
    assert _hint("--width", {"--hp": Required}) == "width is a field of --hp: --hp '{\"width\": 8}'"
    assert _hint("--depth", {"--hp": Required}).endswith("--hp '{\"depth\": VALUE}'")


def test_defaults_of_another_base_leave_the_rules_too_and_other_metadata_are_no_rules():
    @dataclass(frozen=True)
    class Long:
        epochs: int = 0
        width: int = dataclasses.field(default=8, metadata={"help": "of the hidden layer"})

    @dataclass(frozen=True)
    class Both(Long, TrainingSettings):
        width: int = 16
        seed: ClassVar[int] = 3  # type: ignore[misc]

    with pytest.raises(InputError, match=r"Both\.epochs must be at least 1, got 0"):
        Both()
    assert (Both(epochs=5).width, Both.seed) == (16, 3)


def test_missing_fields_take_defaults_and_whole_numbers_become_floats():
    hp = Hyperparameters.from_json('{"epochs": 3.0, "learning_rate": 1}')
    assert hp == dataclasses.replace(Hyperparameters(), epochs=3, learning_rate=1.0)
    assert isinstance(hp.learning_rate, float)
    assert isinstance(hp.epochs, int)
    assert Hyperparameters.from_json(hp.to_json()) == hp


def test_fields_that_dataclasses_would_leave_aside_are_refused():
    class Undecorated(TrainingSettings):
        width: int = 8

    class UndecoratedDefault(TrainingSettings):
        epochs = 7

    @dataclasses.dataclass(frozen=True)
    class Untyped(TrainingSettings):
        epochs = 7

    for kind in (Undecorated, UndecoratedDefault):
        with pytest.raises(InputError, match=rf"^{kind.__name__} needs @dataclass\(frozen=True\)"):
            kind()
    with pytest.raises(InputError, match=r"^Untyped.epochs must have a type, as in epochs: int = 7"):
        Untyped()

    class Same(TrainingSettings):
        UNIT: ClassVar[str] = "images"

    assert Same(epochs=3).epochs == 3


def test_text_that_is_not_json_is_shown():
    with pytest.raises(InputError, match=r'Hyperparameters: not JSON: .*line 1 column 1.*, got "epochs=3"'):
        Hyperparameters.from_json("epochs=3")


def test_json_that_is_too_deep_is_refused():
    with pytest.raises(InputError, match="Hyperparameters: not JSON: nested too deeply"):
        Hyperparameters.from_json("[" * 100_000)


def test_a_whole_number_that_flyte_cannot_store_is_refused():
    with pytest.raises(InputError, match=r"Hyperparameters\.epochs must be a whole number of 64 bits, got 9"):
        Hyperparameters.from_json('{"epochs": 9223372036854775808}')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"epochs": 2', ["not JSON", "line 1, column 13"]),
        ("nowhere.yaml", ["nowhere.yaml cannot be read", "No such file", ".yaml file"]),
        (".", ["Is a directory"]),
        ("", ["'' cannot be read"]),
    ],
)
def test_unreadable_text_and_files_are_answered_with_place_and_reason(text, words):
    with pytest.raises(InputError) as refused:
        read_settings(text)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("name", "content"), [("hp.json", '{"learning_rate": 1e-3}'), ("hp.yaml", "learning_rate: 0.001\n")]
)
def test_files_are_read_by_their_own_rules(tmp_path, name, content):
    """YAML 1.1 has 1e-3 as a text, and only 1.0e-3 as a number."""
    for begin in ("", "\ufeff"):  # as editors on Windows begin a file
        (tmp_path / name).write_text(begin + content, "utf-8")
        assert read_settings(str(tmp_path / name)) == {"learning_rate": 0.001}
    for number in ("1e-3", "2E5", "-1.5e3", "1.0e-3", ".5e+2"):
        (tmp_path / "text.yaml").write_text(f"learning_rate: {number}\nname: 1e3a")
        assert read_settings(str(tmp_path / "text.yaml")) == {"learning_rate": float(number), "name": "1e3a"}


def test_broken_files_are_answered_with_place_and_reason(tmp_path):
    broken = tmp_path / "broken.yaml"
    for content, words in {"epochs: [2": ["line 1", "expected ',' or ']'"], "\0": ["neither JSON nor YAML"]}.items():
        broken.write_text(content)
        with pytest.raises(InputError) as refused:
            read_settings(str(broken))
        assert all(word in str(refused.value) for word in [str(broken), *words])
    for name in ("deep.json", "deep.yaml"):
        (tmp_path / name).write_text("[" * 100_000)
        with pytest.raises(InputError, match="cannot be read"):
            read_settings(str(tmp_path / name))
    broken.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match="cannot be read"):
        read_settings(str(broken))


@pytest.mark.parametrize(
    "text", ['{"epochs": 1, "seed": 2, "epochs": 3}', '{"values": {"epochs": [1], "epochs": [2]}}']
)
def test_what_is_given_twice_is_refused(tmp_path, text):
    for read in (Hyperparameters.from_json, read_settings):
        with pytest.raises(InputError, match='"epochs" is given twice'):
            read(text)
    file = tmp_path / "hp.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r'hp.json: "epochs" is given twice'):
        read_settings(str(file))


def test_what_is_given_twice_in_yaml_is_refused(tmp_path):
    file = tmp_path / "hp.yaml"
    file.write_text("base: &base {seed: 1, epochs: 2}\nmine:\n  <<: *base\n  epochs: 3\n")
    assert read_settings(str(file))["mine"] == {"seed": 1, "epochs": 3}, "a value that replaces a merged one is meant"
    file.write_text("seed: 1\nepochs: 2\nseed: 3\n")
    with pytest.raises(InputError, match=r'hp.yaml: "seed" is given twice'):
        read_settings(str(file))


@pytest.mark.parametrize("preset", sorted(Path(__file__).parents[1].glob("presets/*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid(preset):
    assert Hyperparameters.from_dict(yaml.safe_load(preset.read_text())) != Hyperparameters()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)
FIELDS = [field.name for kind in (Hyperparameters, RunOptions) for field in dataclasses.fields(kind)]


@settings(deadline=None)
@given(
    kind=st.sampled_from([Hyperparameters, RunOptions]), values=JSON | st.dictionaries(st.sampled_from(FIELDS), JSON)
)
def test_any_json_is_either_accepted_or_refused_in_one_line(kind, values):
    answer = "accepted"
    try:
        kind.from_json(json.dumps(values))
    except InputError as error:
        answer = str(error)
    assert 0 < len(answer) < 600
    assert "\n" not in answer


@settings(deadline=None)
@given(text=st.text())
def test_any_text_is_either_read_or_refused_in_one_line(text):
    answer = "accepted"
    try:
        Hyperparameters.from_json(json.dumps(read_settings(text), default=str))
    except InputError as error:
        answer = str(error)
    assert answer


@dataclass(frozen=True)
class Weighted(TrainingSettings):
    weights: dict = setting({})  # noqa: RUF009 copied


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({0: 1.0}, 'Weighted.weights must have strings as names, as JSON has no others, got 0: write it as "0"'),
        ({"by": [{"class": {True: 1}}]}, r"Weighted.weights.by\[0\].class must have strings as names, .* got True"),
        (
            {"shape": (2, 3)},
            r"Weighted.weights.shape must be what JSON keeps as it is, .* \(tuple\): convert it",
        ),
        ({"a": np.float32(1)}, r"Weighted.weights.a must be what JSON keeps as it is, .* \(float32\): convert it"),
        ({"a": math.inf}, "Weighted.weights.a must be what JSON keeps as it is, a finite number"),
    ],
)
def test_an_object_in_settings_is_the_same_after_it_has_been_json(weights, words):
    with pytest.raises(InputError, match=f"^{words}"):
        Weighted(weights=weights)
    kept = Weighted(weights={"0": [1, 2.5, None, {"deep": True}], "1": {}})
    assert Weighted.from_json(kept.to_json()) == kept
