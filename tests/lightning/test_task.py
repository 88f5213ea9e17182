"""LightningTraining in the parent of the ranks: what it refuses, and what its code consists of."""

import re
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flyte_ddp import LightningOptions, LightningSettings, LightningTraining, RunOptions, TrainingSettings
from flyte_ddp.code.user_code import find_code, join_codes
from flyte_ddp.errors import InputError
from flyte_ddp.lightning.measures import find_unlogged_measures, read_measures
from flyte_ddp.lightning.results import samples_in
from flyte_ddp.lightning.task import check_lightning
from tests.commands import ROOT
from tests.lightning.project import write_project


@pytest.fixture
def project(tmp_path, monkeypatch):
    write_project(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        ("numerals.model:LitNumeral", "numerals.model:Numerals", "defines no LitNumeral"),
        ("numerals.modl:LitNumerals", "numerals.model:Numerals", "no module modl in"),
        ("numerals.model:LitNumerals", "numerals.model:Digits", "defines no Digits"),
        ("numerals/model.py:LitNumerals", "", "name the module with dots and without .py"),
    ],
)
def test_a_wrong_name_is_refused_when_the_workflow_file_is_read(project, module, data, words):
    with pytest.raises(InputError) as raised:
        LightningTraining(module, data=data)
    assert words in raised.value.message


def test_a_wrong_name_of_callbacks_is_refused_when_the_workflow_file_is_read(project):
    with pytest.raises(InputError, match="defines no of_trainers"):
        LightningTraining("numerals.model:LitNumerals", callbacks="numerals.variants:of_trainers")


def test_the_headline_may_be_named_as_the_module_logs_it(project):
    training = LightningTraining("numerals.model:LitNumerals", headline="val/accuracy", percent=["val_accuracy", "f1"])
    assert (training.headline, training.percent) == ("accuracy", ("accuracy", "f1"))


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (TrainingSettings(), LightningOptions(), "TrainingSettings must derive from flyte_ddp.LightningSettings"),
        (LightningSettings(), RunOptions(), "RunOptions must derive from flyte_ddp.LightningOptions"),
        (LightningSettings(precision="float16"), LightningOptions(), "use bfloat16 or float32"),
    ],
)
def test_what_this_machine_or_lightning_cannot_do_is_refused_before_a_rank_is_started(
    settings, options, words, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError) as raised:
        check_lightning(settings, options)
    assert words in raised.value.message


@pytest.mark.parametrize(
    ("option", "value"),
    [("profile", True), ("log_gradients", True), ("keep_checkpoint", True), ("keep_best", 3), ("sharding", "full")],
)
def test_an_option_that_means_nothing_under_lightning_is_refused(option, value):
    with pytest.raises(InputError, match=f"LightningOptions.{option} is for recipes"):
        LightningOptions.from_dict({option: value})


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (LightningOptions, "devices", "(the Trainer's devices is nproc of LightningOptions); known: nproc, "),
        (LightningSettings, "strategy", "(LightningOptions has it); known: backend, "),
        (LightningSettings, "val_check_interval", "(the Trainer's val_check_interval is the end of each epoch)"),
        (LightningSettings, "max_steps", "(this argument of the Trainer cannot be set: leave it out)"),
    ],
)
def test_an_argument_of_the_trainer_is_told_what_it_is_called_here(kind, name, words):
    with pytest.raises(InputError) as raised:
        kind.from_dict({name: 2})
    assert words in raised.value.message
    assert "sharding" not in raised.value.message, "which would be refused"


@dataclass(frozen=True)
class Placed(LightningSettings):
    data_path: str = ""


def test_a_setting_named_as_what_a_module_gets_besides_is_refused():
    with pytest.raises(InputError, match=r"^Placed.data_path needs another name: __init__ gets something else by it"):
        Placed()


def test_a_limit_of_batches_is_a_share_or_a_whole_number():
    assert LightningSettings(limit_val_batches=0.5, limit_train_batches=100).limit_train_batches == 100
    with pytest.raises(InputError, match="limit_val_batches must be a share of at most 1, or a whole number"):
        LightningSettings(limit_val_batches=2.5)


def test_the_version_follows_the_code_of_the_module_of_its_data_and_of_what_trains_it(project):
    def version():
        training = LightningTraining("numerals.model:LitNumerals", "numerals.data:Numerals", "numerals.watching:watch")
        return training.code.version

    (project / "numerals" / "data.py").write_text("from numerals.model import Numerals\n")
    (project / "numerals" / "watching.py").write_text("def watch(): return []\n")
    first = version()
    (project / "numerals" / "data.py").write_text("# a remark\nfrom numerals.model import Numerals\n")
    assert version() == first
    (project / "numerals" / "data.py").write_text("from numerals.model import Numerals\n\nMORE = 1\n")
    with_more = version()
    assert with_more != first
    (project / "numerals" / "watching.py").write_text("def watch(): return [None]\n")
    assert version() != with_more
    model = find_code("numerals.model:LitNumerals", ranks=("flyte_ddp.lightning.rank",))
    assert model.version != find_code("numerals.model:LitNumerals").version, "the engine is not what trains it"
    assert join_codes([model]).files == model.files == (str(project / "numerals" / "model.py"),)


@dataclass(slots=True)
class Batch:
    scale: torch.Tensor
    inputs: Any


def test_samples_are_counted_in_a_batch_of_any_kind():
    inputs = torch.zeros(4, 2)
    for batch in (inputs, [inputs, 1], {"inputs": (inputs,)}, UserDict(inputs=inputs), Batch(torch.ones(()), [inputs])):
        assert samples_in(batch) == 4
    assert samples_in("no tensor") == 1


def test_measures_have_the_same_name_in_all_splits():
    logged = {"val_loss": torch.tensor(0.5), "val/accuracy": 0.25, "valley": 1, "lr_step": 2.0, "lr": 3.0}
    assert read_measures(logged) == {"loss": 0.5, "accuracy": 0.25, "valley": 1.0, "lr": 3.0}
    forked = {"train_loss_step": 3, "train_loss_epoch": 2, "train_loss": 2, "first_step": 4}
    assert read_measures(forked) == {"loss": 2.0, "first_step": 4.0}
    assert read_measures({"test_loss": 1, "loss": 2, "test_map": torch.ones(2)}) == {"test_loss": 1.0, "loss": 2.0}


@pytest.mark.parametrize(
    ("validated", "has_validation", "has_batches", "problems"),
    [
        ({"loss": 1, "acc": 1}, True, True, []),
        ({}, False, False, [r"nothing is validated, as val_dataloader has no batch: give it samples, or leave it out"]),
        ({}, False, True, [r"headline .*: loss \(nothing is validated\), got 'acc': change it"]),
        (
            {"loss": 1, "acc/dataloader_idx_0": 1, "acc/dataloader_idx_1": 1},
            True,
            True,
            [r"acc is not shown for the validation, .*: log val_acc .* with add_dataloader_idx=False"],
        ),
    ],
)
def test_a_measure_that_is_not_shown_is_named_with_the_cause(validated, has_validation, has_batches, problems):
    said = find_unlogged_measures("acc", {"loss"}, validated, has_validation, has_batches)
    assert [bool(re.fullmatch(words, one)) for words, one in zip(problems, said, strict=True)] == [True] * len(problems)


def test_without_lightning_a_workflow_file_is_read_and_a_run_says_what_to_install(project):
    program = """if True:
        import sys
        sys.modules["lightning"] = None  # as where it is not installed
        from flyte_ddp import LightningOptions, LightningSettings, LightningTraining
        from flyte_ddp.errors import InputError
        from flyte_ddp.lightning.task import check_lightning
        LightningTraining("numerals.model:LitNumerals", data="numerals.model:Numerals")
        assert not {"torch", "sklearn"} & set(sys.modules)
        try:
            check_lightning(LightningSettings(), LightningOptions())
        except InputError as error:
            print(error.message)
    """
    environment = {"PYTHONPATH": f"{ROOT}:{project}", "HOME": str(project), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project, env=environment, capture_output=True, text=True, timeout=300
    )
    assert 'pip install "flyte-ddp-training[lightning]"' in done.stdout, done.stderr
