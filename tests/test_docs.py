"""The guides as their readers follow them: the files are written, the commands are run, in their order."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT, output, pyflyte, python, typed
from tests.examples import project
from tests.lightning.project import write_project

pytestmark = pytest.mark.slow


def test_the_guide_to_an_own_model_works_as_it_stands(tmp_path):
    text = (ROOT / "docs" / "your-own-model.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks].count("sh") == 6
    said = []
    for kind, block in blocks:
        if kind == "python":
            file = tmp_path / block.partition("\n")[0].removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block)
        elif block == "python more.py\n":  # plain.py has a process of its own
            said.append(python("more.py", tmp_path).stdout)
        else:
            said.append(typed(block, tmp_path, {"PYTHONPATH": f"{ROOT}:{tmp_path}"}).stdout)
    assert "'within': " in said[0]
    assert "2177 parameters" in said[1]
    assert (tmp_path / "notes.txt").read_text().startswith("epoch 1: {'loss': ")
    assert (tmp_path / "trained-by-torchrun" / "model.pt").is_file()
    assert "best_epoch=" in said[3]
    two, tuned = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("two", "tuned"))
    assert {name for name in two if torch.equal(two[name], tuned[name])} == {"0.weight", "0.bias"}
    assert (tmp_path / "three" / "model.pt").is_file()
    assert "exported={'safetensors': " in said[5]


def test_the_guide_to_a_lightning_module_works_as_it_stands(tmp_path):
    text = (ROOT / "docs" / "lightning.md").read_text()
    write_project(tmp_path)
    (command,) = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = typed(command, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "Epoch 2 of 2: validation accuracy " in done.stderr
    assert "Warning" not in done.stderr
    tested = re.findall(r" measures={'loss': [\d.]+, 'accuracy': ([\d.]+)}", done.stdout)
    assert float(tested[0]) > 0.5
    report, model = Path(output(done, "report")).read_text(), torch.load(output(done, "model_state"), weights_only=True)
    assert "test accuracy" in report
    assert model.keys() == {"network.0.weight", "network.0.bias", "network.3.weight", "network.3.bias"}
    again = typed(command, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "Epoch 1" not in again.stderr, "cached"
    assert output(again, "model_state") == output(done, "model_state")
    alone = typed(command.replace('"nproc": 2', '"nproc": 1'), tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "Epoch 2 of 2" in alone.stderr, "the result depends on the number of ranks"


def test_the_guide_to_transforms_works_as_it_stands(tmp_path):
    text = (ROOT / "docs" / "transforms.md").read_text()
    for name, block in re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(block)
    assert re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL) == ["python run.py\n"]
    done = python("run.py", tmp_path)
    assert "alike" not in done.stderr
    digits, again, turned, again_turned = (line.split()[1] for line in done.stdout.splitlines())
    assert digits == again != turned == again_turned


def test_the_readmes_own_model_trains_as_it_stands(tmp_path):
    text = (ROOT / "README.md").read_text()
    for block, name in re.findall(r"^```python\n(# (flowers/\S+)\n.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(block)
    (tmp_path / "flowers" / "__init__.py").touch()
    (command,) = re.findall(r"`(pyflyte run flowers/[^`]+)`", text)
    done = typed(command, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert float(re.findall(r"'accuracy': ([\d.]+)", done.stdout)[-1]) > 0.9


def test_the_readmes_own_model_trains_under_flyte_2_by_the_pages_file(tmp_path):
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/flyte-2.md"))
    for block, name in re.findall(r"^```python\n(# (flowers/\S+)\n.*?)^```", readme + page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(block)
    (tmp_path / "flowers" / "__init__.py").touch()
    (command,) = re.findall(r"`(flyte run --local flowers/[^`]+)`", page)
    done = typed(f"{command} && python -m flowers.many_nodes", tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "Epoch 30 of 30: test accuracy" in done.stderr
    ours, theirs = (
        len((tmp_path / "flowers" / name).read_text().splitlines()) for name in ("flyte2.py", "workflow.py")
    )
    assert ours <= theirs


def test_the_guide_to_large_models_works_as_it_stands():
    text, recipe = ((ROOT / name).read_text() for name in ("docs/large-models.md", "examples/charlm/recipe.py"))
    (units,) = re.findall(r"^    (fsdp_units = .*)$", text, re.MULTILINE)
    assert units in recipe
    (command,) = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    small = json.dumps({"characters": 12_000, "width": 16, "epochs": 1})
    done = pyflyte(*shlex.split(command)[2:], "--settings", small, cwd=project())
    assert "'perplexity': " in done.stdout


def test_the_guide_to_data_larger_than_a_disk_works_as_it_stands(tmp_path):
    text = (ROOT / "docs" / "blocks.md").read_text()
    for name, block in re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(block)
    (command,) = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    said = [python(line.removeprefix("python "), tmp_path).stdout for line in command.splitlines()]
    assert "'within': " in said[-1]
