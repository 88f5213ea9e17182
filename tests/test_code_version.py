"""What a cache key and a checkpoint follow: the code that decides the result, found by its imports."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit.core.cache import VersionParameters

from flyte_ddp.attempt.pod import check_code
from flyte_ddp.attempt.requested import training_environment
from flyte_ddp.code.code_version import _imports, _imports_of_library, find_sources, hash_of_body
from flyte_ddp.code.user_code import ENGINE
from flyte_ddp.errors import ReportedError
from flyte_ddp.flyte1.caching import CodeVersion

ROOT = Path(__file__).parents[1]
RECIPES = (
    "flyte_ddp.recipes.images:ImageClassifier",
    "contrastive.recipe:Contrastive",
    "tabular.recipe:Tabular",
)
OF_ALL = (
    "flyte_ddp/engine/loop.py", "flyte_ddp/engine/checks/probe.py", "flyte_ddp/engine/predict.py",
    "flyte_ddp/recipe.py", "flyte_ddp/settings.py", "flyte_ddp/batch_share.py", "flyte_ddp/data/description.py",
)  # fmt: skip
OF_NONE = (
    "flyte_ddp/launch/launcher.py", "flyte_ddp/launch/process_group.py", "flyte_ddp/report/page.py",
    "flyte_ddp/flyte1/train.py", "flyte_ddp/attempt/summaries.py", "flyte_ddp/training.py",
    "flyte_ddp/lightning/rank.py", "flyte_ddp/export/rank.py", "workflows/mnist.py",
)  # fmt: skip
RECIPE_FILE = "examples/contrastive/recipe.py"
OF_SOME = {
    "flyte_ddp/recipes/airbench.py": RECIPES[:2],
    "flyte_ddp/recipes/images.py": RECIPES[:2],
    "flyte_ddp/recipes/models.py": RECIPES[:2],
    "flyte_ddp/data/image_files.py": RECIPES[:2],
    "flyte_ddp/data/prepared/prepared.py": RECIPES[:2],
    "examples/tabular/recipe.py": RECIPES[2:],
    RECIPE_FILE: RECIPES[1:2],
}
# What a cached task has a process of its own run, and what only tasks that are not cached do
CACHED = {"engine.worker", "engine.predict", "recipes.images", "inference.rank", "lightning.rank"}
NOT_CACHED = {"engine.joined", "export.rank", "promote.rank"}
# They import by a computed name: a recipe's, from which find_code starts, or that of the class of a file's settings,
# which only loading without settings needs. code_version itself only computes names
COMPUTED = {
    "engine/load.py",
    "lightning/modules.py",
    "model_files/model_metadata.py",
    "code/code_version.py",
    "data/fsspec_compat.py",
}

EDIT = """if True:
    import json, sys
    from pathlib import Path
    from flyte_ddp.code.user_code import find_code
    recipes, edits = json.load(sys.stdin)
    before, changed = {name: find_code(name).version for name in recipes}, []
    for file, addition in edits:
        path = Path(file)
        text = path.read_text()
        path.write_text(text + addition)
        changed.append([name for name in recipes if find_code(name).version != before[name]])
        path.write_text(text)
    assert "torch" not in sys.modules
    print(json.dumps(changed))
"""


@pytest.mark.slow
def test_every_version_follows_just_the_code_that_decides(tmp_path):
    for folder in ("flyte_ddp", "workflows", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    expected = {**dict.fromkeys(OF_ALL, RECIPES), **OF_SOME, **dict.fromkeys(OF_NONE, ())}
    edits = [(file, "\nADDED = 1\n") for file in expected] + [(RECIPE_FILE, "\n# a remark\n")]
    done = subprocess.run(
        [sys.executable, "-c", EDIT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "examples")])},
        input=json.dumps([RECIPES, edits]),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    *changed, by_remark = (tuple(names) for names in json.loads(done.stdout))
    assert dict(zip(expected, changed, strict=True)) == expected
    assert by_remark == ()


@pytest.mark.parametrize(
    "statement", ["from flyte_ddp import Classifier", "from flyte_ddp import *", "import flyte_ddp"]
)
def test_what_a_recipe_imports_from_the_library_itself_stands_for_its_module(tmp_path, statement):
    (tmp_path / "own_recipe.py").write_text(statement)
    found = find_sources(["own_recipe"], str(tmp_path))
    assert "flyte_ddp.recipes.classifier" in found
    assert "flyte_ddp" not in found, "a name more in it changes no result"


def test_imports_of_the_library_are_found_without_reading_it_as_python_does():
    for file in (file for file in (ROOT / "flyte_ddp").rglob("*.py") if "template" not in file.parts):
        text = file.read_text()
        found = _imports([*ast.walk(ast.parse(text))], "flyte_ddp")
        assert {*_imports_of_library(text)} == {name for name in found if name.startswith("flyte_ddp.")}, file


def _strings_and_imports(file: Path) -> "tuple[set[str], bool]":
    """The modules of this library that a file names in "module:name", and whether it imports by a computed name."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {found[1] for text in strings if (found := re.fullmatch(r"flyte_ddp\.([\w.]+):\w+", text))}
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    names = {
        getattr(call.func, "attr", getattr(call.func, "id", ""))
        for call in calls
        if not isinstance(call.args[0], ast.Constant)
    }
    return named, bool(names & {"import_module", "resolve_name", "__import__"})


def test_every_module_that_is_started_by_name_is_in_a_version_or_not_cached():
    files = [*(ROOT / "flyte_ddp").rglob("*.py"), *(ROOT / "workflows").glob("*.py")]
    named = set().union(*(_strings_and_imports(file)[0] for file in files if "template" not in file.parts))
    assert (
        named - {"new.command", "run.command", "script.command", "watch.command", "watch.compare"}
        == CACHED | NOT_CACHED
    )


def test_what_decides_imports_nothing_by_a_computed_name_that_is_not_stated():
    modules = find_sources([*ENGINE, *(f"flyte_ddp.{name}" for name in CACHED), "flyte_ddp.keras.rank"])
    library = ROOT / "flyte_ddp"
    files = [Path(source.file) for source in modules.values()]
    assert {str(file.relative_to(library)) for file in files if _strings_and_imports(file)[1]} == COMPUTED


def test_a_cache_version_follows_code_distributions_and_the_tasks_body_and_types():
    def task(x: int) -> int:
        return x

    def other(x: int) -> float:
        return x

    def changed(x: int) -> int:
        return x + 1

    def version(code: str, distributions: "list[str]", function: object) -> str:
        return CodeVersion(code, distributions).get_version("", VersionParameters(function))

    others = [version("b", [], task), version("a", ["torch"], task), version("a", [], other), version("a", [], changed)]
    versions = [version("a", [], task), *others]
    assert len(set(versions)) == 5
    assert version("a", [], task) == versions[0]


def test_a_body_counts_without_decorators_defaults_docstring_and_comments():
    def one(x: int, y: int = 1) -> str:
        text = """
a"""
        return text * x

    @functools.cache
    def two(x: int, y: int = 2) -> str:
        """Return it."""
        text = """
a"""
        return text * x  # times

    def three(x: int) -> str:
        text = "a"
        return text * x

    assert hash_of_body(one) == hash_of_body(two) != hash_of_body(three)
    assert hash_of_body(len) == "", "it has no source"


def test_a_pod_with_other_code_than_registered_is_refused(monkeypatch):
    code = CodeVersion("a")
    check_code(code.code)
    for name, value in training_environment(0, code.code).items():
        monkeypatch.setenv(name, value)
    check_code(code.code)
    with pytest.raises(ReportedError, match="leave out --copy none"):
        check_code("b")
