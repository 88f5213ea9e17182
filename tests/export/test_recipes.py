"""Export of recipes: trained for real, each format opened again in a process of its own."""

import dataclasses
import functools
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile
from safetensors import safe_open

from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.export.settings import ExportOptions, check_formats
from flyte_ddp.export.task import export_recipe
from flyte_ddp.flyte1.inputs import classifier_metadata
from flyte_ddp.flyte1.recipe import RecipeTraining
from flyte_ddp.model_files.model_metadata import add_metadata, read_required_metadata
from flyte_ddp.recipes.models import load_model
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import train
from tests import examples
from tests.commands import ROOT, same
from tests.examples import RECIPES

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def local_execution():
    """As within a task that pyflyte runs here."""
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield


def trained(recipe, settings, output, data=None):
    return train(recipe, settings, RunOptions(nproc=1), data=data, output=output, on_event=lambda event: None)


def exported(recipe, settings, model_path, data=None, init=None, **options):
    folder, first = (FlyteDirectory(str(given), remote_directory=False) if given else None for given in (data, init))
    training, weights = RecipeTraining(recipe), FlyteFile(str(model_path))
    return export_recipe(training, weights, settings, data=folder, init=first, options=ExportOptions(**options))


@pytest.fixture(scope="module")
def trained_lines(tmp_path_factory):
    """trained_lines(recipe): the folder of a short training of a recipe of tests/export/networks.py."""

    @functools.cache
    def train_once(recipe):
        name, settings = lines(recipe)
        return trained(name, settings, tmp_path_factory.mktemp(recipe)).model_path.parent

    return train_once


def lines(recipe):
    return f"tests.export.networks:{recipe}", TrainingSettings(epochs=2, batch_size=20)


@pytest.fixture
def short(trained_lines, tmp_path):
    """short(recipe): the name, settings and weights of such a training, in a copy that a test may change."""

    def copy(recipe):
        shutil.copytree(trained_lines(recipe), tmp_path / recipe)
        return *lines(recipe), tmp_path / recipe / "model.pt"

    return copy


def test_a_network_that_has_become_nan_is_not_exported(short, tmp_path):
    recipe, settings, path = short("Lines")
    weights = {name: weight * torch.nan for name, weight in torch.load(path, weights_only=True).items()}
    torch.save(weights, tmp_path / "broken.pt")
    with pytest.raises(InputError, match="must have a finite loss on the test split, got nan"):
        exported(recipe, settings, tmp_path / "broken.pt", formats="safetensors")


# Of texts, and of a folder's images, whose networks test_folder.py has in the other formats
@pytest.mark.parametrize(("example", "formats"), [("charlm", "safetensors,pt2,onnx"), ("resnet", "safetensors")])
def test_every_format_gives_the_measures_that_the_training_reported(example, formats):
    trained, data = examples.trained(example, 1), examples.data_of(example)
    recipe = f"{example}.recipe:{RECIPES[example]}"
    path = trained.folder / "model.pt"
    outputs = exported(recipe, examples.small_settings(example), path, data, formats=formats)
    assert outputs.summary.measures == pytest.approx(trained.measures, abs=1e-4)
    assert set(outputs.summary.exported) == {*formats.split(",")}
    for found in outputs.summary.exported.values():
        assert found == pytest.approx(trained.measures[outputs.summary.headline], abs=1e-4)
    model = Path(outputs.model.path)
    if data is None:
        assert_load_by_name_alone([path, model / "model.safetensors"], trained.weights)
    else:  # a process of its own takes seconds
        assert same(load_model(model / "model.safetensors", data_path=Path(data)).state_dict(), trained.weights)
    card = (model / "model_card.md").read_text()
    assert ("The files contain only the network" in card) == (example == "charlm")
    assert ("data\\_path=DATA" in card) == (data is not None)
    assert Path(outputs.report.path).read_text() == (model / "model_card.html").read_text()


@pytest.mark.parametrize("rank", [4, 0])
def test_what_their_libraries_write_they_open_again_with_the_same_measures(tmp_path, rank):
    recipe, encoder = "finetune_text.recipe:FinetuneText", examples.init_of("finetune_text")
    settings = dataclasses.replace(examples.small_settings("finetune_text"), lora_rank=rank)
    result = train(recipe, settings, RunOptions(nproc=1), output=tmp_path, init=encoder, on_event=lambda event: None)
    formats = "safetensors,pretrained,onnx" if rank else "safetensors,pretrained"  # ONNX of the network within adapters
    outputs = exported(recipe, settings, result.model_path, init=encoder, formats=formats)
    for found in outputs.summary.exported.values():
        assert found == pytest.approx(result.tested["accuracy"], abs=1e-4)
    model = Path(outputs.model.path)
    whole = (model / "model.safetensors").stat().st_size
    assert (model / "pretrained" / ("adapter_config.json" if rank else "config.json")).is_file()
    (weights,) = (model / "pretrained").glob("*.safetensors")
    assert weights.stat().st_size < whole / 10 if rank else weights.stat().st_size > 0.9 * whole
    assert "init\\_path=INIT" in (model / "model_card.md").read_text()
    kind = RecipeTraining(recipe).code.name.partition(":")[0]
    network = pkgutil.resolve_name(kind).FinetuneText.load_model(model / "model.safetensors", init_path=encoder)
    assert sum(weight.numel() for weight in network.parameters()) == outputs.summary.parameters


def test_pretrained_is_for_networks_that_can_write_it(short):
    name, settings, path = short("Lines")
    with pytest.raises(InputError, match="only networks of transformers and peft have save_pretrained, got Sequential"):
        exported(name, settings, path, formats="pretrained")


def test_tied_weights_are_in_a_file_once(short):
    name, settings, path = short("Tied")
    outputs = exported(name, settings, path, formats="safetensors")
    file = Path(outputs.model.path) / "model.safetensors"
    with safe_open(file, "numpy") as opened:
        assert set(opened.keys()) == {"0.weight", "2.bias"}
    network = load_model(file)
    assert len(list(network.parameters())) == 2
    found = torch.load(path, weights_only=True)
    assert set(found) == {"0.weight", "2.weight", "2.bias"}
    assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr()


def assert_load_by_name_alone(files, weights):
    program = """if True:
        import sys
        from flyte_ddp.recipes.models import load_model
        for file in sys.argv[1:]:
            model = load_model(file)
            assert not model.training
            print(sum(p.double().sum().item() for p in model.state_dict().values()))
    """
    command, place = [sys.executable, "-c", program, *map(str, files)], examples.project()
    done = subprocess.run(command, cwd=place, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total = sum(value.double().sum().item() for value in weights.values())
    assert [float(line) for line in done.stdout.split()] == [pytest.approx(total)] * len(files)


def test_a_network_that_is_made_from_its_data_asks_for_them():
    path = examples.trained("resnet", 1).folder / "model.pt"
    with pytest.raises(InputError, match=r"resnet.recipe:ResNet makes its network from its data, images: give data_pa"):
        load_model(path)


def test_a_recipes_model_is_none_of_the_built_in_workflows(short):
    *_, path = short("Lines")
    with pytest.raises(InputError, match=r"must be of a built-in classifier, and .*model.pt is of tests.export.netwo"):
        classifier_metadata(PythonPickledFile(str(path)))


def test_inputs_by_name_and_nested_outputs_come_through(short):
    name, settings, path = short("Nested")
    outputs = exported(name, settings, path)
    assert len(outputs.summary.exported) == 3
    assert set(outputs.summary.classes) == {"below", "above"}
    card = (Path(outputs.model.path) / "model_card.md").read_text().replace("\\", "")
    inputs = re.findall(r"\| Input \| (.+) float32 \|", card)
    assert inputs == ["points: (batch, 2)", "input_1: (batch, 1)", "shift: (batch, 1)"]
    assert "| Output | output_scores_1: (batch, 2) float32 |" in card
    (call,) = re.findall(r"model\.pt2.*module\(\)(\(.*\))", card)
    program, points = torch.export.load(Path(outputs.model.path) / "model.pt2").module(), torch.rand(5, 2)
    found = eval(
        f"program{call}", {"program": program, "points": points, "input_1": points[:, 1:], "shift": points[:, :1]}
    )
    expected = load_model(path)(points, points[:, 1:], scale=2.0, shift=points[:, :1])
    assert torch.equal(found["scores"][1], expected["scores"][1])


def test_outputs_that_one_format_cannot_hold_go_into_the_others(short):
    name, settings, path = short("Named")
    with pytest.raises(InputError, match=r"cannot be exported to pt2: .*leave pt2 out of formats"):
        exported(name, settings, path)
    assert set(exported(name, settings, path, formats="safetensors,onnx").summary.exported) == {"safetensors", "onnx"}


def test_texts_of_any_length_go_through_the_files(short):
    recipe, settings, path = short("Words")
    outputs = exported(recipe, settings, path)
    assert set(outputs.summary.exported) == {"safetensors", "pt2", "onnx"}
    assert "| Input | words: (batch, any) int64 |" in (Path(outputs.model.path) / "model_card.md").read_text()


def test_a_format_that_computes_something_else_fails_the_export(short):
    name, settings, path = short("Lying")
    with pytest.raises(
        ReportedError, match=r"model.pt2 gives loss \d\.\d+ on the test split, but the model \d\.\d+ \(tolerance"
    ):
        exported(name, settings, path, formats="safetensors,pt2")


def test_a_network_that_no_program_can_hold_is_exported_as_weights_alone(short):
    name, settings, path = short("Choosing")
    with pytest.raises(InputError, match=r"cannot be exported to onnx: .*leave onnx out of formats"):
        exported(name, settings, path, formats="safetensors,onnx")
    outputs = exported(name, settings, path, formats="safetensors")
    found = {file.name for file in Path(outputs.model.path).iterdir()}
    assert found == {"model.json", "model.safetensors", "model_card.html", "model_card.md"}


def test_weights_that_are_not_those_of_the_reported_measures_fail_the_export(short):
    name, settings, path = short("Lines")
    known, weights = read_required_metadata(path, ""), torch.load(path, weights_only=True)
    torch.save({key: -value for key, value in weights.items()}, path)
    add_metadata(path, known)
    with pytest.raises(InputError, match=r"model_state gives loss \d\.\d+ on the test split, but the training rep"):
        exported(name, settings, path, formats="safetensors")
    torch.save({key: -value for key, value in weights.items()}, path)
    with pytest.raises(InputError, match="model_state gives accuracy"):
        exported(name, settings, path, formats="safetensors", reported={"accuracy": 0.99})
    with pytest.raises(InputError, match="reported must name measures of the recipe, loss, accuracy, got 'f1'"):
        exported(name, settings, path, formats="safetensors", reported={"f1": 0.99})


def test_weights_of_another_network_are_refused(short):
    name, settings, path = short("Lines")
    with pytest.raises(InputError, match=r"must fit the network, got .*model.pt with missing keys bias, weight; un"):
        exported(name.replace("Lines", "Lying"), settings, path)


@pytest.mark.parametrize(
    ("formats", "words"), [("tflite", "got 'tflite'"), (" , ", "got ''"), ("onnx,tf", "some of safetensors, pt2, onnx")]
)
def test_unknown_formats_are_refused(formats, words):
    with pytest.raises(InputError, match=words):
        ExportOptions(formats=formats)


def test_without_the_libraries_it_says_which_and_how_to_get_them(short, monkeypatch):
    name, settings, path = short("Lines")
    model = exported(name, settings, path, formats="safetensors").model.path
    for library in ("onnx", "onnxruntime", "safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, library, None)
    check_formats(ExportOptions(formats="pt2"))
    hint = 'pip install "flyte-ddp-training[export]"'
    said = f"the format onnx needs onnx, onnxruntime, which is not installed: {hint}, or leave onnx out of formats"
    with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
        check_formats(ExportOptions(formats="onnx"))
    said = f"this file needs safetensors, which is not installed: {hint}, or load a .pt file"
    with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
        load_model(Path(model) / "model.safetensors")
