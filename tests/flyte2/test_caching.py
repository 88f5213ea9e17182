"""What decides whether a result of Flyte 2 is reused, and what a pod asks for."""

import asyncio
import importlib
import os
import pickle
import secrets
import shutil
import time
from typing import Any

import flyte
import pytest
from flyte._cache.cache import VersionParameters
from flyte.extend import get_proto_extended_resources, get_proto_resources
from flyte.io import Dir
from flyte.types import TypeEngine
from flyteidl2.core.literals_pb2 import Binary, Literal, Scalar
from flyteidl2.core.tasks_pb2 import Resources as Proto
from flyteidl2.task.common_pb2 import NamedLiteral, Outputs
from packaging.version import Version

from flyte2 import mnist
from flyte_ddp.attempt import requested
from flyte_ddp.attempt.platform_training import IMAGE_CLASSIFIER
from flyte_ddp.code.code_version import with_installed
from flyte_ddp.flyte2.environment import cached, resources
from flyte_ddp.flyte2.flyte_compat import local_cache
from flyte_ddp.flyte2.inputs import forget_lost_results
from flyte_ddp.flyte2.recipe import RecipeTraining
from flyte_ddp.flyte2.train import image_training
from tests.commands import ROOT


def version(task_arguments):
    return task_arguments["cache"].get_version()


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples" / "tabular", tmp_path / "tabular")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_version_follows_the_code_and_torch_but_no_comment(project, monkeypatch):
    file = project / "tabular" / "recipe.py"

    def found():
        return version(RecipeTraining("tabular.recipe:Tabular").arguments())

    first = found()
    file.write_text(f"# a remark\n{file.read_text()}")
    assert found() == first
    file.write_text(file.read_text().replace("nn.ReLU()", "nn.GELU()"))
    second = found()
    assert second != first
    monkeypatch.setattr("flyte_ddp.code.code_version.version", lambda name: "99")
    assert found() != second, "another torch in the image"


def test_a_training_is_cached_by_all_that_the_library_imports_for_it_and_not_by_options():
    cache: Any = mnist.train.cache
    assert cache.get_ignored_inputs() == ("options",)
    assert cache.serialize
    assert cache.get_version() == with_installed(f"{IMAGE_CLASSIFIER.name} {IMAGE_CLASSIFIER.version}", ["torch"])


def test_a_task_whose_body_has_changed_is_computed_again():
    environment = flyte.TaskEnvironment("edited")
    number = secrets.randbelow(2**60)  # which no earlier test has cached

    def define(factor):
        if factor == 2:

            @environment.task(cache=cached("1"))
            async def multiply(number: int) -> int:
                return 2 * number
        else:

            @environment.task(cache=cached("1"))
            async def multiply(number: int) -> int:
                return 3 * number

        return multiply

    for factor in (2, 3):
        assert flyte.with_runcontext("local").run(define(factor), number=number).outputs()[0] == number * factor


def test_a_body_that_is_edited_while_it_runs_is_not_found_by_what_it_was_edited_to(project):
    (project / "edited.py").write_text("async def double(number: int) -> int:\n    return 2 * number\n")
    double = importlib.import_module("edited").double
    cache, parameters = cached("1"), VersionParameters(func=double)
    before = cache.get_version(parameters)
    assert cache.get_version(parameters) == before
    (project / "edited.py").write_text("async def double(number: int) -> int:\n    return 3 * number\n")
    os.utime(project / "edited.py", (time.time() + 1,) * 2)
    edited = cache.get_version(parameters)
    assert edited not in (before, cache.get_version(parameters), cached("1").get_version(parameters))


def test_a_pod_gets_what_is_registered(monkeypatch):
    monkeypatch.setenv("DDP_GPUS", "4")
    monkeypatch.setenv("DDP_ACCELERATOR", "A100_80GB")
    monkeypatch.setenv("DDP_TRAINING_DISK", "5Gi:20Gi")
    monkeypatch.setenv("DDP_WANDB_SECRET", "wandb/key")
    environment: Any = image_training.environment("trains")
    asked: Any = get_proto_resources(environment.resources)
    amounts = {Proto.ResourceName.Name(entry.name): entry.value for entry in [*asked.requests, *asked.limits]}
    assert amounts == {"CPU": "8", "MEMORY": "32Gi", "GPU": "4", "EPHEMERAL_STORAGE": "20Gi"}
    kind: Any = get_proto_extended_resources(environment.resources)
    assert kind.gpu_accelerator.device == "nvidia-a100-80gb"
    assert environment.env_vars["DDP_POD_GPUS"] == "4"
    assert environment.env_vars["DDP_TRAINING_CODE"] == IMAGE_CLASSIFIER.version
    (secret,) = environment.secrets
    assert (secret.group, secret.key, secret.as_env_var) == ("wandb", "key", "WANDB_API_KEY")


def test_a_small_pod_asks_for_little_and_may_take_more():
    asked: Any = get_proto_resources(resources(requested.small_size()))
    values = {Proto.ResourceName.Name(entry.name): entry.value for entry in asked.requests}
    assert values["CPU"] == "100m"


def test_what_other_projects_have_cached_is_theirs_whatever_it_is(monkeypatch, tmp_path):
    """A value of a type that Flyte does not know is pickled."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".flyte" / "local-cache").mkdir(parents=True)
    (tmp_path / ".flyte" / "local-cache" / "cache.db").touch()
    pickled = NamedLiteral(name="o0", value=Literal(scalar=Scalar(binary=Binary(value=pickle.dumps(Version("1.0"))))))
    with local_cache() as cache:
        entry = "theirs", Outputs(literals=[pickled]).SerializeToString()
        cache.execute("INSERT INTO task_cache VALUES (?, ?)", entry)
    forget_lost_results()
    with local_cache() as cache:
        assert cache.execute("SELECT * FROM task_cache").fetchall() == [entry]


def test_a_lost_folder_is_found_in_an_optional_output_and_in_a_dict(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".flyte" / "local-cache").mkdir(parents=True)
    (tmp_path / ".flyte" / "local-cache" / "cache.db").touch()
    lost = Dir(path=f"{tmp_path}/lost")
    outputs: list[tuple[Any, Any]] = [(lost, Dir | None), ({"a": lost}, dict[str, Dir])]
    for number, (value, kind) in enumerate(outputs):
        literal = asyncio.run(TypeEngine.to_literal(value, kind, TypeEngine.to_literal_type(kind)))
        entry = Outputs(literals=[NamedLiteral(name="o0", value=literal)]).SerializeToString()
        with local_cache() as cache:
            cache.execute("INSERT INTO task_cache VALUES (?, ?)", (str(number), entry))
    forget_lost_results()
    with local_cache() as cache:
        assert not cache.execute("SELECT key FROM task_cache").fetchall()
