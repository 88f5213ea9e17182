"""A user's recipe in the ranks: imported from its own root, and nothing beside it that was not found."""

import sys
from pathlib import Path

import pytest

from flyte_ddp.code.user_code import find_code
from flyte_ddp.errors import InputError
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Settings
from tests.test_user_code import REPOSITORY, write

RECIPE = """
        import workflows.shared
        from flyte_ddp.code.user_code import checked_imports
        def report(environment, link, argument):
            import sys
            return workflows.shared.WHOSE, sys.path[0]
        def check(environment, link, argument):
            from importlib import import_module
            root, files, name = argument
            with checked_imports(root, files):
                import_module(name)
            with checked_imports(root, files):  # imported before, by others
                import_module(name)
        """


@pytest.fixture
def code(tmp_path):
    launcher.warm_up()  # the ranks are forked from a process that is older than the user's code
    root = write(tmp_path, {**REPOSITORY, "workflows/shared.py": "WHOSE = 'mine'", "of_mine.py": RECIPE})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        found = find_code("of_mine:report")
    assert found.root not in sys.path
    return found


def launch(target, argument, root):
    world = World(size=1, local_size=1, backend="gloo", device="cpu")
    before = list(sys.path)
    try:
        return launcher.launch(target, world, argument, 60, lambda event: None, root=root)
    finally:
        assert sys.path == before


def test_ranks_import_from_a_root_that_the_parent_does_not_know_and_from_its_own_workflows(code):
    assert launch(code.name, None, code.root) == [("mine", code.root)]
    assert "of_mine" not in sys.modules


def test_an_import_by_a_computed_name_is_refused_in_the_rank(code):
    with pytest.raises(
        InputError, match=r"imported by a computed name: plain.folder.deep \(plain/folder/deep.py\)\. The"
    ):
        launch("of_mine:check", (code.root, code.files, "plain.folder.deep"), code.root)
    declared = (*code.files, str(Path(code.root, "plain/folder/deep.py")))
    assert launch("of_mine:check", (code.root, declared, "plain.folder.deep"), code.root) == [None]


@pytest.mark.parametrize("name", ["flyte_ddp.watch.compare", "colorsys"])
def test_the_library_and_installed_modules_may_be_imported_by_any_name(code, name):
    assert launch("of_mine:check", ("/", code.files, name), code.root) == [None]


BY_COMPUTED_NAME = """
        from importlib import import_module
        from tests.engine.probe_recipes import Sound
        class Late(Sound):
            def {method}(self, *arguments):
                import_module("computed_" + "in_{method}")
                return super().{method}(*arguments)
        """


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", ["data", "model", "measure"])
def test_an_import_by_a_computed_name_is_refused_wherever_it_is_before_training(tmp_path, monkeypatch, method):
    module = f"computed_in_{method}"
    write(tmp_path, {f"late_{method}.py": BY_COMPUTED_NAME.format(method=method), f"{module}.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=f"imported by a computed name: {module} \\({module}.py\\)"):
        train(f"late_{method}:Late", Settings(), RunOptions(), output=tmp_path / "trained")
