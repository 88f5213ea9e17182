"""The sweep by pyflyte, and by the pods of a cluster."""

import csv
import os
import runpy
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.literals_pb2 import Literal, LiteralCollection, Scalar, Void
from flytekit.core.context_manager import FlyteContextManager, FlyteEntities
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.errors import InputError
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.platform import TaskError
from flyte_ddp.flyte1.recipe import RecipeOutputs
from flyte_ddp.launch.failures import Failure
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.sweep.halving import Entrant, TrialResult, latest_results
from flyte_ddp.sweep.search import Sweep
from flyte_ddp.sweep.task import next_rung, run_sweep, try_out
from flyte_ddp.training import train
from scripts.dry_run import decode
from tests.attempt.test_checkpoints import on_a_cluster
from tests.commands import ROOT, pyflyte, words
from tests.object_storage import object_storage
from tests.pod import Pod, container_of, literal, package_for_here, small_dataset

SWEEP = ["workflows/sweep.py", "sweep_wf"]
DIGITS = ["--hp", '{"dataset": "digits", "epochs": 1, "batch_size": 512}']
HP = Hyperparameters(epochs=4, batch_size=100, learning_rate=0.05)


def table(path: str) -> list[Any]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ('{"values": {"learning_rat": [0.1]}}', "did you mean learning_rate?"),
        ('{"values": {"batch_size": [1, 3]}}', "at least the number of ranks (2), got 1"),
        ('{"measure": "loss"}', "Sweep.measure must be accuracy for image classifiers"),
    ],
)
def test_a_wrong_sweep_is_a_usage_error_before_anything_is_done(sweep, said, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DATA_DIR", str(tmp_path / "data"))
    command = [*SWEEP, *DIGITS, "--sweep", sweep, "--options", '{"nproc": 2}']
    assert said in words(pyflyte(*command, status=2).stderr)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("cause", ["OutOfMemoryError", "InputError", "SIGKILL"])
def test_what_may_not_follow_from_the_hyperparameters_is_no_result_to_be_cached(cause):
    def train(hp: Hyperparameters) -> Any:
        raise platform.error(Failure(0, "host", "error", cause, "why", recoverable=False), "why")

    with pytest.raises(TaskError, match="why"):
        try_out(train, Hyperparameters, Entrant(HP.to_json()))


def test_a_trial_that_continues_takes_its_checkpoint_in_place_of_the_weights_that_it_began_with(tmp_path):
    """Else Python would refuse the keyword twice, after the first rung."""
    (tmp_path / "checkpoint").touch()
    given: list[str] = []

    def train(hp: Hyperparameters, init: FlyteFile) -> Any:
        given.append(init.path)
        raise TaskError(Failure(0, "host", "error", "NonFiniteError", "why"), "why")

    for checkpoint in ("", str(tmp_path / "checkpoint"), str(tmp_path / "gone")):
        try_out(train, Hyperparameters, Entrant(HP.to_json(), checkpoint), init=FlyteFile("model.pt"))
    assert given == ["model.pt", str(tmp_path / "checkpoint"), "model.pt"]


def test_a_trial_without_an_evaluation_has_failed_for_want_of_the_measure(tmp_path):
    """As of a loop of the user's own that returns within its first epoch."""
    figures: Any = SimpleNamespace(
        measures={}, validation_samples=0, test_samples=5, total_seconds=1.0, lower_is_better=[]
    )
    outputs = RecipeOutputs([], PythonPickledFile(""), figures, FlyteFile(""), FlyteDirectory(str(tmp_path)))
    result = try_out(lambda settings: outputs, TrainingSettings, Entrant(TrainingSettings().to_json()))
    (trial,) = latest_results(Sweep(), [asdict(TrainingSettings())], [[result]])
    assert trial.result.failure == "it has no measure accuracy"


def test_a_trial_of_the_last_rung_stores_its_report_and_no_checkpoint(tmp_path):
    (tmp_path / "report.html").write_text("<!DOCTYPE html>")
    figures: Any = SimpleNamespace(
        measures={}, validation_samples=0, test_samples=5, total_seconds=1.0, lower_is_better=[]
    )
    report, logs = FlyteFile(str(tmp_path / "report.html")), FlyteDirectory(str(tmp_path))
    outputs = RecipeOutputs([{"accuracy": 0.5}], PythonPickledFile(""), figures, report, logs)
    with on_a_cluster(None, tmp_path / "pod"):
        result = try_out(lambda settings: outputs, Hyperparameters, Entrant(HP.to_json()))
        raw = FlyteContextManager.current_context().file_access.raw_output_prefix
    assert result.report.startswith(raw)
    assert Path(result.report).read_text() == "<!DOCTYPE html>"
    assert result.checkpoint == ""


def test_trials_from_a_folder_of_weights_are_not_cut():
    sweep, trials = Sweep(reduction_factor=2), [HP, replace(HP, seed=2)]
    with pytest.raises(InputError, match="must be 1 where trials start from a folder of weights"):
        run_sweep(sweep, trials, None, "texts", init=FlyteDirectory("base"))
    run: Any = None
    with pytest.raises(InputError, match="must be 1 where trials start from a folder of weights"):
        try_out(run, Hyperparameters, Entrant(HP.to_json(), "checkpoint"), init=FlyteDirectory("base"))


# --- in pods ---


def test_a_trial_is_registered_as_a_training(monkeypatch):
    monkeypatch.setattr(FlyteEntities, "entities", [])
    for name, value in {"DDP_RETRIES": "7", "DDP_AVOID_HOURS": "24", "DDP_AVOID_HOSTS": "node-1"}.items():
        monkeypatch.setenv(name, value)
    trial = runpy.run_path(str(ROOT / "workflows" / "sweep.py"), run_name="registered")["train_trial"]
    assert (trial.metadata.retries, trial.environment["DDP_POD_RETRIES"]) == (7, "7")
    affinity = trial.pod_template.pod_spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
    assert affinity.node_selector_terms[0].match_expressions[0].values == ["node-1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("pods")


def literals(values: list[Any]) -> Literal:
    return Literal(collection=LiteralCollection(literals=[literal(value) for value in values]))


def rungs(*results: list[Literal]) -> Literal:
    found = [Literal(collection=LiteralCollection(literals=of_one)) for of_one in results]
    return Literal(collection=LiteralCollection(literals=found))


@pytest.mark.slow
def test_pods_of_a_map_task_report_what_came_of_their_trial_and_that_of_the_next_rung_goes_on(place):
    inputs = {
        "sweep": literal(Sweep(concurrency=3, reduction_factor=2)),
        "trials": literals([replace(HP, learning_rate=rate) for rate in (0.05, 0.1)]),
        "name": literal("digits"),
        "options": literal(RunOptions()),
    }
    pod = Pod(package_for_here().tasks["workflows.sweep.run_trials"], inputs, place / "run")
    assert pod.finish() == 0, pod.log
    job = DynamicJobSpec.FromString((pod.folder / "futures.pb").read_bytes())
    rung, last = (node.array_node for node in job.nodes if node.HasField("array_node"))
    assert {(node.parallelism, *node.bound_inputs) for node in (rung, last)} == {(3, "data", "options")}
    assert 0 < rung.min_success_ratio * 2 <= 1, "one trial's failure is not the sweep's"
    names = [node.task_node.reference_id.name for node in job.nodes]
    assert names.count("flyte_ddp.sweep.task.next_rung") == 1
    compared = job.nodes[names.index("flyte_ddp.sweep.task.compare_trials")]
    (bound,) = (one.binding.collection.bindings for one in compared.inputs if one.var == "rungs")
    assert len(bound) == 2
    (mapped,) = (task for task in job.tasks if "train_trial" in task.id.name)
    registered = package_for_here().tasks["workflows.sweep.train_trial"]
    assert (mapped.metadata, container_of(mapped).resources) == (
        registered.metadata,
        container_of(registered).resources,
    )

    given = {"data": small_dataset(place / "small"), "options": literal(RunOptions())}
    recipe, first = "flyte_ddp.recipes.images:ImageClassifier", replace(HP, stop_after=1)
    train(recipe, first, RunOptions(nproc=1), place / "small", place / "first", on_event=lambda event: None)
    checkpoint = (place / "first" / "final-checkpoint").read_bytes()
    with object_storage() as storage:
        storage.objects["bucket/rung/final-checkpoint"] = checkpoint
        going = Entrant(replace(HP, stop_after=2).to_json(), "s3://bucket/rung/final-checkpoint")
        environment = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "INDEX", "INDEX": "0", **storage.environment}
        second = Pod(mapped, {"entrant": literals([going]), **given}, place / "second", environment=environment)
        trained = second.run()["o0"]
    assert "Continues from final-checkpoint, after epoch 1" in second.log
    result = TrialResult(**decode(trained))
    assert (result.failure, result.split) == ("", "test"), "as it was not told to hold any images out"
    assert result.checkpoint.startswith(str(second.folder / "raw")), "Flyte's storage"
    other = TrialResult({"accuracy": 0.01}, 296)
    (going,) = next_rung(sweep=Sweep(reduction_factor=2), trials=[HP.to_json()] * 2, rungs=[[result, other]])
    assert going == Entrant(HP.to_json(), result.checkpoint)

    lost = Literal(scalar=Scalar(none_type=Void()))
    diverged = literal(TrialResult(failure="NonFiniteError: loss is not finite in epoch 1"))
    results = [literal(TrialResult({"accuracy": 0.1}, 296)), lost, trained, diverged]
    inputs = {
        "sweep": literal(Sweep()), "subject": literal("digits"), "trials": literals([HP.to_json()] * 4),
        "rungs": rungs(results),
    }  # fmt: skip
    pod = Pod(package_for_here().tasks["flyte_ddp.sweep.task.compare_trials"], inputs, place / "compare")
    outputs = pod.run()
    assert Hyperparameters.from_json(decode(outputs["best"])) == HP
    best, *others = table(outputs["table"].scalar.blob.uri)
    assert (best["trial"], best["learning_rate"], best["failure"]) == ("3", "0.05", "")
    assert best["report"].startswith(str(second.folder / "raw")), "Flyte's storage"
    assert os.path.getsize(best["report"]) > 10_000
    assert [trial["trial"] for trial in others] == ["1", "2", "4"]
    assert "the log of its pod says why" in others[1]["failure"]
    assert "finite" in others[2]["failure"]
    assert "the log of its pod says why" in (pod.folder / "deck.html").read_text()
