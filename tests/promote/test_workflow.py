"""Promotion by pyflyte and by a pod's command, on real digits, to a folder and to an object storage."""

import dataclasses
import json
import math
import pkgutil
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgpack
import pytest
from flytekit.core.context_manager import CompilationState, FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile

from flyte_ddp.attempt.platform_training import IMAGE_CLASSIFIER
from flyte_ddp.code.user_code import find_code
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.engine.job import Measured, make_subject
from flyte_ddp.errors import InputError
from flyte_ddp.flyte1 import platform
from flyte_ddp.model_files.model_metadata import ModelMetadata, add_metadata
from flyte_ddp.promote.job import PromotionOptions, judge
from flyte_ddp.promote.place import Place
from flyte_ddp.promote.promotion import promote
from flyte_ddp.promote.task import check_promotion
from flyte_ddp.recipes.hyperparameters import FashionMNISTHyperparameters, Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from scripts.dry_run import decode
from tests import examples
from tests.commands import ROOT, output, pyflyte, words
from tests.once import trained_classifier
from tests.packages import full_package
from tests.pod import Pod, literal, package, package_for_here
from workflows.mnist import pytorch_mnist_task
from workflows.promote import candidate

PROMOTE = str(ROOT / "workflows" / "promote.py")
HP: dict[str, Any] = {"dataset": "digits", "epochs": 1, "train_fraction": 0.1}


@pytest.fixture(scope="module")
def weak():
    return trained_classifier(train_fraction=0.05)


@pytest.fixture(scope="module")
def strong():
    return trained_classifier(train_fraction=0.5)


def to(place, model, **promotion):
    inputs = ["--model_state", str(model), "--promotion", json.dumps(promotion)]
    return [PROMOTE, "promote_wf", "--place", str(place), *inputs]


@pytest.mark.slow
def test_a_better_model_is_promoted_and_an_earlier_one_comes_back(weak, strong, tmp_path):
    """In a folder: test_place.py has one in an object storage."""
    assert weak.accuracy < strong.accuracy
    first = pyflyte(*to(tmp_path, weak.model))
    assert (output(first, "promoted"), output(first, "current")) == ("True", "None")
    version = output(first, "version")
    assert (tmp_path / "versions" / version / "model.pt").read_bytes() == weak.model.read_bytes()

    better = pyflyte(*to(tmp_path, strong.model))
    assert output(better, "promoted") == "True"
    assert (float(output(better, "candidate")), float(output(better, "current"))) == (strong.accuracy, weak.accuracy)
    page = Path(output(better, "report")).read_text()
    assert f"{strong.accuracy:.2%}, before {weak.accuracy:.2%}" in page
    assert version in page, "in the history"

    back = pyflyte(PROMOTE, "roll_back_wf", "--place", str(tmp_path), "--name", version)
    assert f"Promoted: {version}" in back.stderr
    pointer = json.loads((tmp_path / "current.json").read_text())
    assert pointer["version"] == version
    assert [event["how"] for event in pointer["history"]] == ["promoted", "promoted", "rolled back"]


def test_what_cannot_be_promoted_is_one_error(weak, tmp_path):
    place = tmp_path / "models"
    place.mkdir()
    (place / "current.json").write_text("{")
    damaged = pyflyte(*to(place, weak.model), status=1)
    (place / "current.json").unlink()
    network = pyflyte(*to(place, weak.model), "--hp", '{"model": "fashion_cnn"}', status=2)
    untrained = pyflyte(PROMOTE, "promote_wf", "--place", str(weak.model / "models"), status=2)
    for done, said in zip(
        (damaged, network, untrained),
        ("damaged (JSONDecodeError", "model_state must fit the network, got", "must be writable: "),
        strict=True,
    ):
        assert said in words(done.stderr)
    assert "Train Epoch" not in untrained.stderr
    assert not list(place.glob("versions/*"))


def test_a_given_model_says_itself_what_it_is_of(tmp_path):
    trained = dataclasses.asdict(FashionMNISTHyperparameters(epochs=7))
    known = ModelMetadata(IMAGE_CLASSIFIER.name, "", trained, {"name": "fashion_mnist"}, {}, "accuracy", {}, {}, {})
    model = tmp_path / "model.pt"
    with ZipFile(model, "w") as archive:
        archive.writestr("model/version", "3")
    add_metadata(model, known)

    def checked(**asked):
        hp, place = Hyperparameters(**asked), str(tmp_path / "models")
        file = PythonPickledFile(str(model))
        return check_promotion.task_function(place=place, model_state=file, hp=hp, options=RunOptions())

    target = checked()
    assert target.dataset == "fashion_mnist"
    assert dataclasses.asdict(target.hp) == trained
    target = checked(dataset="digits", model="resnet9")
    assert (target.dataset, target.hp.model, target.hp.epochs) == ("digits", "resnet9", 7)


def test_a_candidate_is_trained_as_by_the_workflow_of_mnist_and_so_taken_from_its_cache():
    context = FlyteContextManager.current_context()
    state = CompilationState(prefix="")
    with FlyteContextManager.with_context(context.with_compilation_state(state)):
        hp = Hyperparameters(epochs=3)
        candidate.task_function(model_state=None, hp=hp, name="mnist", options=RunOptions())
    (training,) = (node for node in state.nodes if node.flyte_entity is pytorch_mnist_task)
    (given,) = (one for one in training.bindings if one.var == "hp")
    assert msgpack.loads(given.binding.scalar.binary.value) == dataclasses.asdict(hp), "the dataset's name is auto"


ACCURATE = Measured(
    {"loss": 0.1, "accuracy": 0.9, "f1": 0.8}, "accuracy", ("accuracy",), 100, {"loss": True, "accuracy": False}
)
BETTER = dataclasses.replace(ACCURATE, measures={"loss": 0.2, "accuracy": 0.92, "f1": 0.8})


@pytest.mark.parametrize(
    ("options", "is_better"),
    [
        ({}, True),
        ({"margin": 0.019}, True),
        ({"margin": 0.021}, False),
        ({"margin": 0.02}, False),
        ({"measure": "loss"}, False),
        ({"measure": "loss", "better": "higher"}, True),
        ({"measure": "f1", "better": "higher"}, False),
    ],
)
def test_better_is_by_more_than_the_margin(options, is_better):
    assert judge(BETTER, ACCURATE, PromotionOptions(**options)).is_better == is_better


@pytest.mark.parametrize(
    ("options", "words"),
    [({"measure": "f2"}, "measure must be one of loss, accuracy, f1, got 'f2'"), ({"measure": "f1"}, "better must be")],
)
def test_a_measure_that_cannot_decide_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        judge(BETTER, None, PromotionOptions(**options))


def test_any_model_is_better_than_one_that_has_become_nan():
    assert judge(BETTER, dataclasses.replace(ACCURATE, measures={"accuracy": math.nan}), PromotionOptions()).is_better


def test_a_candidate_that_has_diverged_is_not_even_the_first():
    with pytest.raises(InputError, match="accuracy must be finite, got nan"):
        judge(dataclasses.replace(ACCURATE, measures={"accuracy": math.nan}), None, PromotionOptions())


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_tells_of_a_broken_network_whatever_its_accuracy(loss):
    """Most samples being of the first class, always guessing that is often right."""
    broken = dataclasses.replace(ACCURATE, measures={**ACCURATE.measures, "loss": loss, "accuracy": 0.99})
    for current in (None, ACCURATE):
        with pytest.raises(InputError, match=f"the candidate's loss must be finite, got {loss}"):
            judge(broken, current, PromotionOptions())
    assert judge(BETTER, broken, PromotionOptions()).is_better


@pytest.mark.slow
def test_a_retried_pod_says_what_the_attempt_before_has_done(weak, strong, tmp_path):
    task = package_for_here().tasks["flyte_ddp.promote.task.promote_images"]

    def pod(name, model):
        inputs = {
            "model_state": literal(PythonPickledFile(str(model), remote_path=False)),
            "data": literal(FlyteDirectory(str(prepare("digits")), remote_directory=False)),
            "hp": literal(Hyperparameters(**HP)),
            "place": literal(str(tmp_path / "models")),
            "options": literal(PromotionOptions()),
        }
        execution = {"FLYTE_INTERNAL_EXECUTION_ID": name[:1]}
        return Pod(task, inputs, tmp_path / name, environment=execution)

    pyflyte(*to(tmp_path / "models", weak.model))
    outputs = pod("b", strong.model).run_here(), pod("b, retried", strong.model).run()
    once, again = (decode(attempt["summary"]) for attempt in outputs)
    assert once == again
    assert (once["candidate"], once["current"]) == (strong.accuracy, weak.accuracy)
    assert len(Place(platform, str(tmp_path / "models")).read().history) == 2


@pytest.mark.slow
def test_a_recipe_is_promoted_by_its_headline_the_right_way_round(tmp_path):
    examples.project()  # now it can be imported
    example, settings = "charlm.recipe:CharLM", {"characters": 12_000, "width": 16, "layers": 1}
    kind = pkgutil.resolve_name("charlm.settings:Settings")
    code, place = find_code(example), Place(platform, str(tmp_path / "models"))

    def candidate(epochs):
        mine = kind(epochs=epochs, precision="float32", **settings)
        output = train(example, mine, RunOptions(nproc=1), output=tmp_path / str(epochs), on_event=lambda event: None)
        return make_subject(code, mine), output.model_path, output

    (worse, its_model, output), (better, model, _) = candidate(1), candidate(4)
    first = promote(platform, worse, its_model, place, PromotionOptions())
    assert (first.summary.promoted, first.summary.measure) == (True, "perplexity")
    assert first.summary.candidate == pytest.approx(output.epochs[-1].test["perplexity"], abs=1e-4)
    second = promote(platform, better, model, place, PromotionOptions())
    assert second.summary.promoted
    assert second.summary.candidate < first.summary.candidate
    assert not promote(platform, worse, its_model, place, PromotionOptions()).summary.promoted
    assert not promote(platform, worse, its_model, place, PromotionOptions(measure="accuracy")).summary.promoted
    assert promote(platform, worse, its_model, place, PromotionOptions(better="higher")).summary.promoted


@pytest.mark.parametrize(
    ("registered", "name"),
    [(package, "workflows.mnist.pytorch_training_wf"), (full_package, "workflows.promote.promote_wf")],
)
def test_the_nightly_plan_promotes_where_a_place_was_named(registered, name):
    nightly = registered().launch_plans["nightly"].spec
    assert nightly.entity_metadata.schedule.cron_schedule.schedule == "0 3 * * *"
    assert nightly.workflow_id.name == name
    assert decode(nightly.default_inputs.parameters["hp"].default)["dataset"] == "mnist"
    if registered is full_package:
        assert decode(nightly.default_inputs.parameters["place"].default) == "s3://bucket/mnist"
    assert all(
        parameter.WhichOneof("behavior") == "default" for parameter in nightly.default_inputs.parameters.values()
    )
