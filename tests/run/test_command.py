"""flyte-ddp run."""

import re

import pytest
import torch
from click.testing import CliRunner

from flyte_ddp.__main__ import main
from tests.examples import project


def run(*arguments):
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A user in the folder of their packages."""
    monkeypatch.chdir(project())


def test_it_trains_with_the_settings_that_it_is_given(tmp_path):
    given = ["--epochs", "1", "--width", "16", "--learning-rate", "1e-2", "--nproc", "2", "--resume", "False"]
    status, said = run("own_loop.loop:train", *given, "--output", str(tmp_path / "trained"))
    assert status == 0, said
    assert torch.load(tmp_path / "trained" / "model.pt", weights_only=True)["0.weight"].shape == (16, 64)


def test_its_help_has_what_the_docstrings_say_of_each_setting():
    status, said = run("tabular.recipe:Tabular", "--help")
    assert status == 0
    for words in (
        "--width int [default: 32]", "--test-batch-size int samples of one evaluation batch, all ranks together.",
        "--compile bool whether torch.compile compiles", "--nproc int ranks to spawn;", "[default: trained]",
    ):  # fmt: skip
        assert words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], r"give a name such as \"package.module:Name\", got 'nothing'"),
        (["tabular.recipe:Tabluar"], r"defines no Tabluar \(did you mean Tabular\?\)"),
        (["tabular.recipe:Tabular", "--epochs", "many"], "--epochs must be a whole number, got many"),
        (["tabular.recipe:Tabular", "--epochs", "0"], "Settings.epochs must be at least 1, got 0"),
        (["tabular.recipe:Tabular", "--resume", "perhaps"], "--resume must be true or false, got perhaps"),
        (["tabular.recipe:Tabular", "--epoch", "1"], "No such option '--epoch'.*--epochs"),
        (["--settings-class", "os:path", "tabular.recipe:Tabular"], "--settings-class must be a subclass of"),
        (["--settings-class", "nowhere:X", "tabular.recipe:Tabular"], "--settings-class must name the class of"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words):
    status, said = run(*arguments)
    assert status != 0
    assert re.search(words, said), said
