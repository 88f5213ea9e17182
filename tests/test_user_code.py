"""A user's recipe by name: found, hashed and shipped without being imported."""

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from flyte_ddp.code.code_version import find_sources
from flyte_ddp.code.user_code import find_code, find_observers
from flyte_ddp.engine.job import make_subject
from flyte_ddp.errors import InputError
from flyte_ddp.settings import TrainingSettings

ROOT = Path(__file__).resolve().parents[1]

# "no torch" stands for all that the parent must not import: it fails as soon as anybody does
REPOSITORY = {
    "recipes/__init__.py": "raise RuntimeError('no torch')",
    "recipes/flowers.py": """
        import no_torch, sklearn.svm, os
        import recipes.layers as layers
        from typing import TYPE_CHECKING
        from . import petals
        from .petals import Petal
        from plain.folder.deep import VALUE
        from plain import folder
        if TYPE_CHECKING:
            import for_types
        class Flowers:
            def build(self):
                from importlib import import_module
                import workflows.shared
                return import_module("named"), import_module(".sibling", __package__)
        def build(): pass
        Roses = Flowers
        """,
    "recipes/layers.py": "from flyte_ddp.errors import InputError",
    "recipes/petals.py": "from .flowers import Flowers\nPetal = 1",  # in a circle
    "recipes/sibling.py": "",
    "recipes/labels.txt": "rose tulip",
    "recipes/unused.py": "",
    "watching/notes.py": "import watching.words, no_torch\nclass Notes: pass",
    "watching/words.py": "",
    "plain/folder/deep.py": "VALUE = 1",  # no __init__.py
    "for_types.py": "",
    "named.py": "",
    "workflows/__init__.py": "",
    "workflows/shared.py": "",
    "workflows/train.py": "",
}
IMPORTED = [
    "for_types.py", "named.py", "plain/folder/deep.py", "recipes/__init__.py", "recipes/flowers.py",
    "recipes/layers.py", "recipes/petals.py", "recipes/sibling.py", "workflows/__init__.py", "workflows/shared.py",
]  # fmt: skip
NAME = "recipes.flowers:Flowers"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def repository(tmp_path, monkeypatch):
    root = write(tmp_path / "repository", REPOSITORY)
    monkeypatch.syspath_prepend(root)
    return root


def relative(code):
    return [Path(file).relative_to(code.root).as_posix() for file in code.files]


# --- finding ---


def test_all_first_party_imports_are_found_and_none_is_imported(repository):
    before = set(sys.modules)
    code = find_code(NAME)
    assert (code.name, code.root) == (NAME, str(repository))
    assert relative(code) == IMPORTED
    assert list(code.files) == sorted(code.files)
    assert not {name for name in set(sys.modules) - before if name.startswith(("recipes", "plain", "named"))}


@pytest.mark.parametrize("name", ["recipes.flowers:build", "recipes.flowers:Roses", "recipes.flowers:petals"])
def test_a_name_may_come_by_definition_assignment_or_import(repository, name):
    assert relative(find_code(name)) == IMPORTED


def test_a_name_may_come_by_a_star(repository):
    write(repository, {"all.py": "from recipes.flowers import *"})
    assert "recipes/flowers.py" in relative(find_code("all:Flowers"))


@pytest.mark.parametrize(
    ("name", "file", "root"),
    [
        ("named:x", "named.py", "."),
        ("package:x", "package/__init__.py", "."),
        ("package.inner:x", "package/inner/__init__.py", "."),
        ("folder.inner.module:x", "folder/inner/module.py", "."),
        ("acme.net:x", "src/acme/net.py", "src"),
    ],
)
def test_the_root_is_the_folder_to_import_from(tmp_path, monkeypatch, name, file, root):
    write(tmp_path, {"package/__init__.py": "", file: "x = 1"})
    monkeypatch.syspath_prepend(tmp_path / root)
    code = find_code(name)
    assert code.root == str((tmp_path / root).resolve())
    assert str(tmp_path / file) in code.files


def test_the_library_beside_it_is_not_the_users(repository):
    write(repository, {"flyte_ddp/__init__.py": "", "flyte_ddp/errors.py": ""})
    assert relative(find_code(NAME)) == IMPORTED


def test_an_installed_recipe_is_alone_with_its_own_package(tmp_path, monkeypatch):
    installed = write(
        tmp_path / "lib" / "site-packages",
        {"acme/__init__.py": "", "acme/net.py": "import other, acme.layers as x", "acme/layers.py": "", "other.py": ""},
    )
    monkeypatch.syspath_prepend(installed)
    code = find_code("acme.net:x")
    assert relative(code) == ["acme/__init__.py", "acme/layers.py", "acme/net.py"]


def test_the_standard_library_is_installed_too():
    assert {"json/__init__.py", "json/decoder.py"} <= set(relative(find_code("json:load")))


def test_an_environment_below_the_root_is_not_first_party(repository, monkeypatch):
    installed = write(repository / ".venv/lib/python3/site-packages", {"no_torch.py": ""})
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(repository)
    assert relative(find_code(NAME)) == IMPORTED


# --- the version ---


def test_the_version_is_the_same_on_every_python(tmp_path, monkeypatch):
    """Of source that Python 3.10 to 3.13 read into different trees."""
    text = 'class X(a, *b, c=1): y: int\ndef f(a, /, *b): return f"{a:{b}}", None, 1e999, "é🫨"'
    write(tmp_path, {"module.py": text})
    monkeypatch.syspath_prepend(tmp_path)
    assert find_sources(["module"], str(tmp_path))["module"].hash.startswith("2d19b4b5100091b1")


@pytest.mark.parametrize(
    "edited",
    [
        '"1"\nclass X:\n    """2"""\n    def f(self):\n        "3"\n        return "a", 2',
        "class X:  # a comment\n\n    def f(self):\n        return ('a',\n            2)\n",
    ],
)
def test_the_version_stays_when_comments_docstrings_or_formatting_change(tmp_path, monkeypatch, edited):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, {"module.py": '"""One."""\nclass X:\n    """Two."""\n    def f(self):\n        return "a", 2'})
    before = find_code("module:X").version
    write(tmp_path, {"module.py": edited})
    assert find_code("module:X").version == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = [[1], 2]", "x = [1, [2]]"),
        ("x = 1", "x = True"),
        ("x = None", "x = ..."),
        ("x = y(z)", "x = y('z')"),
        ("x = lambda *, a, b=1: 1", "x = lambda *, a=1, b: 1"),
        ("x = {**a, b: c}", "x = {a: b, **c}"),
        ("x = -1 + 2", "x = -(1 + 2)"),
        ("x = 1\nif x:\n  x = 2\n  x = 3", "x = 1\nif x:\n  x = 2\nx = 3"),
    ],
)
def test_the_version_changes_with_the_code(tmp_path, monkeypatch, one, other):
    monkeypatch.syspath_prepend(tmp_path)
    versions = [find_code("module:x").version for text in (one, other) if write(tmp_path, {"module.py": text})]
    assert versions[0] != versions[1]


def test_the_version_changes_with_what_is_imported_and_with_data_files_and_with_their_names(repository):
    versions = [find_code(NAME).version, find_code(NAME, ["labels.txt"]).version]
    write(repository, {"recipes/labels.txt": "rose  tulip"})
    versions.append(find_code(NAME, ["labels.txt"]).version)
    (repository / "recipes/labels.txt").rename(repository / "recipes/names.txt")
    versions.append(find_code(NAME, ["names.txt"]).version)
    write(repository, {"plain/folder/deep.py": "VALUE = 2"})
    versions += [find_code(NAME).version]
    assert len(set(versions)) == len(versions)


def test_the_version_does_not_depend_on_the_folder_nor_on_code_that_is_not_imported(repository, tmp_path, monkeypatch):
    before = find_code(NAME, ["labels.txt"]).version
    write(repository, {"recipes/unused.py": "x = 1"})
    assert find_code(NAME, ["labels.txt"]).version == before
    repository.rename(tmp_path / "moved")
    monkeypatch.syspath_prepend(tmp_path / "moved")
    assert find_code(NAME, ["labels.txt"]).version == before


# --- mistakes ---


@pytest.mark.parametrize(
    "name", ["recipes.flowers", "recipes/flowers.py:X", "a b:c", "recipes.:X", ":X", "a:b.c", InputError, None]
)
def test_a_malformed_name_is_refused_with_the_form(name):
    with pytest.raises(InputError, match=r'give a name such as "package\.module:Name", got ') as refused:
        find_code(name)
    assert repr(name) in str(refused.value)


def test_a_name_in_the_place_of_several_is_refused():
    with pytest.raises(InputError, match=r"observers must be a list, got 'm:Name': write \['m:Name'\]"):
        find_observers("m:Name")
    with pytest.raises(InputError, match=r"data_files must be a list, got 'labels.txt'"):
        find_code("tests.test_user_code:NAME", "labels.txt")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("recipe.flowers:X", r"no module recipe in .*{root}.*: start in the folder "),
        ("recipes.flower:X", r"no module flower in {root}/recipes: start "),
        ("plain.foldr.deep:X", r"no module foldr in {root}/plain: "),
        ("named.inner:X", "named is a module, {root}/named.py, and has no module inner in it"),
        ("plain.folder:X", "plain.folder is {root}/plain/folder, which has no Python source"),
        ("recipes.flowers:Flower", r"{root}/recipes/flowers.py defines no Flower at its top level"),
        ("recipes.flowers:self", "{root}/recipes/flowers.py defines no self at its top level"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_refused_with_the_place(repository, monkeypatch, name, message):
    monkeypatch.syspath_prepend(sysconfig.get_path("scripts"))  # as in pyflyte and flyte-ddp
    with pytest.raises(InputError, match=message.format(root=repository)) as refused:
        find_code(name)
    assert "site-packages" not in str(refused.value)
    assert sysconfig.get_path("scripts") not in str(refused.value)


def test_a_name_that_a_function_defines_is_for_the_rank_to_find(repository):
    write(repository, {"named.py": "def choose():\n  global X\n  class X: pass\nchoose()"})
    assert find_code("named:X").name == "named:X"


@pytest.mark.parametrize(
    ("text", "line"),
    [("x = 1\nclass Y(:", 2), ("x = 1\n\ny = 'a", 3), ("x = 1\0", 1), ("def f(a):\n  global a", 2)],
)
def test_a_syntax_error_is_reported_with_file_and_line(repository, text, line):
    write(repository, {"named.py": text})
    with pytest.raises(InputError, match=f"{repository}/named.py, line {line}: .* .read by Python 3"):
        find_code("named:x")


def test_a_syntax_error_further_down_is_reported_too(repository):
    write(repository, {"plain/folder/deep.py": "x = 1\nclass Y(:"})
    with pytest.raises(InputError, match=r"deep.py, line 2: "):
        find_code(NAME)


def test_a_data_file_may_be_named_like_python_and_be_none(repository):
    write(repository, {"recipes/template.py": "print {{ name }}"})
    first = make_subject(find_code(NAME, ["template.py"]), TrainingSettings()).hashes
    write(repository, {"recipes/template.py": "print {{ other }}"})
    second = make_subject(find_code(NAME, ["template.py"]), TrainingSettings()).hashes
    assert {name for name in first if first[name] != second[name]} == {"recipes/template.py"}


def test_data_files_are_files_below_the_root(repository):
    with pytest.raises(
        InputError, match=f"'label.txt' is not a file; it is looked for as {repository}/recipes/label.txt"
    ):
        find_code(NAME, ["labels.txt", "label.txt"])
    (repository.parent / "outside.txt").touch()
    with pytest.raises(InputError, match=rf"'../../outside.txt' must lie below {repository}"):
        find_code(NAME, ["../../outside.txt"])
    assert set(relative(find_code(NAME, ["labels.txt", "../named.py"]))) == {*IMPORTED, "recipes/labels.txt"}


# --- shipping ---


def test_a_remote_run_ships_it_from_a_repository_with_workflows_of_its_own(tmp_path):
    root = write(tmp_path, REPOSITORY)
    program = f"""if True:
        import sys
        import workflows.train  # the user's
        from flytekit.constants import CopyFileDetection
        from flytekit.tools.script_mode import ls_files
        from flyte_ddp.flyte1.recipe import RecipeTraining
        RecipeTraining("{NAME}", ["labels.txt"], observers=["watching.notes:Notes"])
        import workflows.shared, named  # one that was shipped already
        watched = RecipeTraining("{NAME}", ["labels.txt"], observers=["watching.notes:Notes"])
        assert watched.code.version == RecipeTraining("{NAME}", ["labels.txt"]).code.version
        assert not {{"torch", "recipes", "plain", "watching"}} & set(sys.modules)
        print("\\n".join(ls_files("{root}", CopyFileDetection.LOADED_MODULES)[0]))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)])}
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    shipped = sorted(Path(file).relative_to(root).as_posix() for file in shown.split())
    assert shipped == sorted(
        [*IMPORTED, "recipes/labels.txt", "watching/notes.py", "watching/words.py", "workflows/train.py"]
    )
