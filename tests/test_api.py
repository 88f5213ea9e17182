"""The library's face: what users import from flyte_ddp itself."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import flyte_ddp
from flyte_ddp.code.user_code import find_code

ROOT = Path(__file__).parents[1]


def _imported(text: str) -> "set[tuple[str, str]]":
    """As (module, name); in a notebook's cell that writes a file, by that file."""
    nodes = [node for node in ast.walk(ast.parse(re.sub(r"^%%.*\n", "", text))) if isinstance(node, ast.ImportFrom)]
    return {(node.module or "", alias.name) for node in nodes for alias in node.names}


def test_each_name_is_that_of_its_module():
    for name, module in flyte_ddp.MODULES.items():
        assert getattr(flyte_ddp, name) is getattr(import_module(module), name)
    files = {file.stem for file in (ROOT / "flyte_ddp").iterdir()}
    assert not files & set(flyte_ddp.MODULES), "once imported, a module would be found instead"
    assert {"__version__", *flyte_ddp.MODULES} == set(flyte_ddp.__all__) <= set(dir(flyte_ddp))
    with pytest.raises(ImportError, match=r"cannot import name 'Recpie' from 'flyte_ddp'"):
        from flyte_ddp import Recpie  # type: ignore[attr-defined]  # noqa: F401


def test_type_checkers_are_told_the_same():
    stub = ROOT / "flyte_ddp" / "__init__.pyi"
    told = {name: module for module, name in _imported(stub.read_text())}
    assert told == flyte_ddp.MODULES


@pytest.mark.slow
def test_a_workflow_file_gets_no_torch_from_it_and_a_script_no_flytekit():
    """What ranks get from it is in test_project.py."""
    program = """if True:
        import sys
        import flyte_ddp
        assert not [name for name in sys.modules if name.startswith(("flyte_ddp.", "torch", "flytekit."))]
        from flyte_ddp import Hyperparameters, RunOptions, TrainingSettings, read_metadata, setting, train
        assert not {"torch", "flytekit.core"} & set(sys.modules)
        from flyte_ddp import RecipeOutputs, RecipeTraining, folder_by_content, prepare_dataset
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_recipe_that_imports_from_it_consists_of_its_own_files(tmp_path, monkeypatch):
    (tmp_path / "own_recipe.py").write_text("from flyte_ddp import Recipe, schedules\n\nclass Mine(Recipe): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_code("own_recipe:Mine").files == (str(tmp_path / "own_recipe.py"),)
    # nor does the face make all that it names part of the library's own recipes
    files = find_code("flyte_ddp.recipes.images:ImageClassifier").files
    assert not [file for file in files if "/flyte1/" in file]


def test_who_cites_it_cites_this_version():
    assert f"\nversion: {flyte_ddp.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pages_examples_and_template_import_from_it():
    """The names it has; what only a few need is imported from its module."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    blocks = [re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in pages]
    files = [file for recipe in ROOT.glob("examples/*/recipe.py") for file in recipe.parent.glob("*.py")]
    files += [*ROOT.glob("docs/tour/*.py"), *(ROOT / "flyte_ddp" / "new" / "template").rglob("*.py")]
    programs = [*(block for page in blocks for block in page), *(file.read_text() for file in files)]
    assert len(programs) > 30
    imported = set().union(*map(_imported, programs))
    assert not imported & {(module, name) for name, module in flyte_ddp.MODULES.items()}
    assert {name for module, name in imported if module == "flyte_ddp"} <= {*flyte_ddp.MODULES, "schedules"}


def test_under_windows_it_says_what_to_do():
    program = "import sys; sys.platform = 'win32'; import flyte_ddp"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "ImportError: flyte_ddp needs Linux or macOS, got Windows: install it in WSL, which is Linux" in done.stderr
