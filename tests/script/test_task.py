"""A script as a task, by the guide to scripts: locally, in a pod and under Flyte 2."""

import os
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from flyte_ddp.__main__ import main
from flyte_ddp.code.user_code import find_script
from flyte_ddp.errors import InputError
from flyte_ddp.manifest import read_manifest
from flyte_ddp.script import flyte2
from flyte_ddp.script.job import RANKS
from flyte_ddp.script.task import ScriptTraining
from flyte_ddp.script.training import check_arguments, check_options
from flyte_ddp.settings import RunOptions
from tests.commands import ROOT, output, typed
from tests.pod import Pod, literal, registered

NANO = Path(__file__).with_name("nano.py")


@pytest.fixture
def project(tmp_path):
    """A user's project as the guide has it, and the guide's commands."""
    text = (ROOT / "docs" / "scripts.md").read_text()
    for package in ("gpt", "gpt_nodes"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "jobs").mkdir()
    shutil.copyfile(NANO, tmp_path / "jobs" / "train.py")
    for name, block in re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(block)
    return tmp_path, re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_guide_to_scripts_works_as_it_stands(project, monkeypatch):
    place, (command, run) = project
    environment = {"PYTHONPATH": f"{ROOT}:{place}"}
    said = typed(command, place, environment).stderr
    assert "[rank 0] iter 20: loss " in said
    assert (place / "trained" / "checkpoints" / "ckpt.pt").is_file()
    monkeypatch.chdir(place)
    again = CliRunner().invoke(main, shlex.split(command)[3:])  # in this process, whose ranks have imported torch
    assert again.exit_code == 0, again.output
    assert "Resuming training from iter 20" in again.stderr
    done = typed(run, place, environment)
    assert "[rank 0] iter 20: loss " in done.stderr
    assert Path(output(done, "checkpoint"), "ckpt.pt").is_file()
    assert "iter 20" in Path(output(done, "logs"), "rank-0.log").read_text()


@pytest.mark.slow
def test_a_killed_pod_leaves_its_checkpoint_to_the_next_attempt(project, tmp_path, monkeypatch):
    place, _ = project
    waits = NANO.with_name("waits.py").read_text()
    (place / "jobs" / "train.py").write_text(waits.replace("sys.argv[1]", "sys.argv[2]"))  # it follows --out_dir
    (place / "gpt").rename(place / "killed_gpt")  # a name that no other test imports
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("DDP_PROFILE", "sandbox")
    task = registered(import_module("killed_gpt.workflow").train_gpt)
    path, inputs = {"PYTHONPATH": f"{ROOT}:{place}"}, {"options": literal(RunOptions(nproc=2))}
    killed = Pod(task, inputs, tmp_path / "killed", path)
    manifest = killed.checkpoints / "checkpoint"
    killed.kill_when(lambda: manifest.exists() and read_manifest(manifest) is not None)
    again = Pod(task, inputs, tmp_path / "again", path, previous=killed)
    outputs = again.run_here()
    assert "resuming from the checkpoint" in again.log
    assert "[rank 1] rank 1 goes on from step 7" in again.log
    assert Path(outputs["checkpoint"].scalar.blob.uri, "ckpt").read_text() == "step 7"


def test_it_is_a_task_of_flyte_2(project, monkeypatch):
    place, _ = project
    monkeypatch.chdir(place)
    training = flyte2.ScriptTraining("jobs/train.py", arguments=["--max_iters", "10"])
    env = training.environment("gpt")

    @env.task(**training.arguments())
    async def train(options: RunOptions) -> str:
        return "never called"

    assert any(str(file).endswith("jobs/train.py") for file in env.include)
    assert training.arguments()["cache"] == "disable"
    assert training.arguments(cache=True)["cache"].behavior == "auto"


def test_the_cache_is_for_those_who_ask_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    training = ScriptTraining("train.py")
    assert training.arguments()["cache"] is False
    assert training.arguments(cache=True)["cache"].serialize


def test_its_code_is_the_script_and_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "own" / "layers.py").write_text("SIZE = 1\n")
    (tmp_path / "scripts" / "beside.py").write_text("WORD = 1\n")
    (tmp_path / "scripts" / "config.json").write_text("{}")
    (tmp_path / "scripts" / "other.py").write_text("")
    (tmp_path / "scripts" / "my-train.v2.py").write_text("import beside\nimport own.layers\nimport torch\n")

    def found():
        return find_script("scripts/my-train.v2.py", ["config.json"], [RANKS])

    first = found()
    assert first.root == str(tmp_path)
    assert {os.path.relpath(file, tmp_path) for file in first.files} == {
        "scripts/my-train.v2.py", "scripts/beside.py", "scripts/config.json", "own/layers.py",
    }  # fmt: skip
    (tmp_path / "scripts" / "other.py").write_text("something = 1\n")
    (tmp_path / "scripts" / "my-train.v2.py").write_text("# why\nimport beside\nimport own.layers\nimport torch\n")
    assert found().version == first.version
    (tmp_path / "scripts" / "beside.py").write_text("WORD = 2\n")
    assert found().version != first.version
    with pytest.raises(InputError, match=r"data file 'none\.json' is not a file; it is looked for as .*/scripts/none"):
        find_script("scripts/my-train.v2.py", ["none.json"])


@pytest.mark.parametrize(
    ("given", "remedy"),
    [("--lr 1", r"write them as in \['--lr', '1'\]"), (["--steps", 3], r"write them as in \['--steps', '3'\]")],
)
def test_arguments_are_a_list_of_texts(given, remedy):
    with pytest.raises(InputError, match=rf"arguments must be a list of texts, got .*: {remedy}"):
        check_arguments(given)


def test_an_option_without_effect_is_refused():
    with pytest.raises(InputError, match=r"RunOptions\.sharding must be 'off' for a script, which .* got 'full'"):
        check_options(RunOptions(sharding="full"))
