"""The house rules that no linter knows."""

import ast
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = [str(lock.relative_to(ROOT)) for pattern in ("*.txt", "examples/*/*.txt") for lock in ROOT.glob(pattern)]


def _project_files() -> list[Path]:
    """All files that git tracks or would track."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout")
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def _pins(lock: str) -> set[str]:
    """Each `name==version` of a lock file, without its marker, which is wider where others need it, too."""
    return set(re.findall(r"^([a-z0-9][^\s=]*==\S+) .*\\$", (ROOT / lock).read_text(), re.MULTILINE))


def _write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _anchors(page: Path) -> set[str]:
    """The anchors that a Markdown page's headings get."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- imports ---


@pytest.mark.slow
def test_what_ranks_import_is_light():
    """flytekit alone would cost each of them 2 s and 90 MB, torchvision 3 s."""
    rooms = ("launch/*.py", "data/**/*.py", "engine/**/*.py", "recipes/*.py", "[!_]*.py", "*/rank.py")
    files = {file for room in rooms for file in (ROOT / "flyte_ddp").glob(room)}
    files.remove(ROOT / "flyte_ddp" / "lightning" / "rank.py")  # Lightning is what that one is for
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in sorted(files)
    ]
    program = """if True:
        import importlib, json, sys
        heavy = {"flytekit", "flytekitplugins", "lightning", "wandb", "torchvision", "matplotlib", "sklearn"}
        blame, before = {}, set(sys.modules)  # a namespace package of a plugin can be there from the start
        for module in sys.argv[1:]:
            importlib.import_module(module)
            for name in heavy & set(sys.modules) - before - set(blame):
                blame[name] = module
        print(json.dumps(blame), flush=True)  # fork_server ends the interpreter without it
    """
    result = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "{}\n", f"each is imported by the module named beside it: {result.stdout} {result.stderr}"


def test_init_files_have_no_code():
    """But the library's face, of which tests/test_api.py says that it imports nothing by itself."""
    files = {*ROOT.glob("[fw]*/**/__init__.py")} - {ROOT / "flyte_ddp" / "__init__.py"}
    trees = {file: ast.parse(file.read_text()) for file in files}
    filled = {file for file, tree in trees.items() if len(tree.body) != (ast.get_docstring(tree) is not None)}
    assert not filled, "workers import the packages, and Flyte ships only modules that it saw imported"


# --- lock files ---


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_index(lock):
    text = (ROOT / lock).read_text()
    found = re.findall(r".*(?:://|--(?:extra-)?index|--find-links|--trusted-host).*", text)
    assert not found, "each site has its own index: compile with `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_has_hashes(lock):
    blocks = re.split(r"\n(?=[a-z0-9])", (ROOT / lock).read_text())
    unhashed = [block.splitlines()[0] for block in blocks[1:] if "--hash=sha256:" not in block]
    assert not unhashed


def test_the_image_has_what_every_feature_needs():
    """And every message about something that is missing names one of the extras.

    All but what the examples train further, and MLflow's client, with which two packages would be older ones.
    """
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\ndev")[0]
    extras = dict(re.findall(r"^([a-z0-9]+) = \[(.*)\]", table, re.MULTILINE))
    of_the_image = [of for extra, of in extras.items() if extra not in ("models", "mlflow")]
    packages = {name for of in of_the_image for name in re.findall('"([a-z-]+)', of)}
    assert len(packages) >= 8
    assert packages <= {pin.partition("==")[0] for pin in _pins("requirements.txt")}
    code = "".join(file.read_text() for file in [*ROOT.glob("flyte_ddp/**/*.py"), *ROOT.glob("workflows/*.py")])
    named = set(re.findall(r"not_installed\([^()]*'(\w+)'\)", code))
    assert {"mlflow", "tensorboard"} <= named <= set(extras)
    patterns = ("*.md", "docs/*.md", "flyte_ddp/new/**/*.md")
    pages = "".join(page.read_text() for pattern in patterns for page in ROOT.glob(pattern))
    written = {name for of in re.findall(r'(?:-training|-e "\.)\[([\w,]+)\]', pages) for name in of.split(",")}
    assert {"export", "lightning"} <= written <= set(extras)


# Packages that always come with another one, which decides their version
COME_WITH = {
    "flyteidl": "flytekit",
    "flyteidl2": "flyte",
    "torchmetrics": "lightning",
    "tqdm": "transformers",
    "triton": "torch",
}


def test_what_is_imported_is_declared():
    """Even if it comes with another package today."""
    files = [file for file in (ROOT / "flyte_ddp").rglob("*.py") if not {"template", "__pycache__"} & {*file.parts}]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "flyte_ddp", *COME_WITH}
    packages = {**packages_distributions(), "mlflow": ["mlflow-skinny"]}
    declared = {*re.findall(r'"([A-Za-z0-9-]+)[>\[]', (ROOT / "pyproject.toml").read_text())}
    assert {*COME_WITH.values()} <= declared
    missing = {name for name in modules if not {one.lower() for one in packages[name]} & declared}
    assert not missing
    assert {"fsspec", "urllib3", "torch"} <= modules


def test_dev_lock_has_the_runtime_versions():
    assert len(_pins("requirements.txt")) > 50
    missing = _pins("requirements.txt") - _pins("requirements-dev.txt")
    assert not missing, "the tests would run other versions than `make run`: compile both with `make lock`"


def test_the_lock_of_keras_fits_beside_the_dev_lock():
    """An image based on ours gets nothing twice."""
    dev, own = _pins("requirements-dev.txt"), _pins("examples/keras/requirements.txt")
    names = {pin.partition("==")[0] for pin in dev}
    assert any(pin.startswith("tensorflow==") for pin in own)
    assert {pin for pin in own if pin.partition("==")[0] in names} <= dev, "compile all locks with `make lock`"


def test_the_image_is_installed_with_the_same_uv_as_everything_else():
    (ours,) = re.findall(r"^UV_VERSION \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f" uv=={ours}\n" in (ROOT / "Dockerfile").read_text()


# --- make ---

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_help_lists_every_target():
    declared = re.findall(r"^\.PHONY: ([a-z0-9 -]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for line in declared for target in line.split()}
    shown = subprocess.run(["make", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert targets >= {"help", "run", "test", "lint", "lock", "clean"}
    assert set(re.findall(r"^make ([a-z0-9-]+) +\S", shown, re.MULTILINE)) == targets


@needs_make
def test_run_passes_quotes_on_and_installs_nothing_twice(tmp_path):
    """In a folder whose .venv is up to date, with stand-ins for the programs: pyflyte shows what it got, uv fails."""
    tools = tmp_path / "tools"
    installed = tmp_path / ".venv" / "bin"
    for folder in (tools, installed):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", ".venv"))
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1, 1))
    for name in ("pyvenv.cfg", "run.stamp", "dev.stamp"):
        (tmp_path / ".venv" / name).touch()
    os.utime(tmp_path / ".venv" / "pyvenv.cfg", (2, 2))
    _write_program(installed / "pyflyte", 'printf "<%s>" "$@"')
    _write_program(installed / "python", "exit 9")
    _write_program(tools / "uv", "exit 9")

    arguments = """ARGS=--hp '{"epochs": 1, "dataset": "digits"}'"""
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}

    def make(*words: str) -> "subprocess.CompletedProcess[str]":
        command = ["make", "-s", *words, arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    line, got = make("run").stdout.splitlines()
    workflow = "workflows/mnist.py pytorch_training_wf"
    assert line == f"+ pyflyte run {workflow} --hp " + """'{"epochs": 1, "dataset": "digits"}'"""
    assert got == """<run><workflows/mnist.py><pytorch_training_wf><--hp><{"epochs": 1, "dataset": "digits"}>"""

    examples = sorted(recipe.parent.name for recipe in ROOT.glob("examples/*/workflow.py"))
    for name in examples:
        line, got = make("example", f"NAME={name}").stdout.splitlines()
        assert line.startswith(f"+ PYTHONPATH=. pyflyte run examples/{name}/workflow.py {name}_wf --hp ")
        assert got.startswith(f"<run><examples/{name}/workflow.py><{name}_wf><--hp>")
    assert f"NAME must be one of {' '.join(examples)}, got 'tabula'" in make("example", "NAME=tabula").stderr
    assert f"Train one of {', '.join(examples)}: " in make("help").stdout

    (tmp_path / ".venv" / "run.stamp").unlink()
    _write_program(tools / "uv", "exit 0")
    said = make("run").stdout.splitlines()
    assert "it downloads 3.3 GB" in said[0], "before it installs"
    assert said[1] == "+ uv pip sync requirements.txt"


@needs_make
def test_unfit_python_is_refused_with_the_remedy(tmp_path):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    _write_program(tmp_path / "python3.9", "exit 1")
    command = ["make", "run", "PYTHON=no-such-python ./python3.9"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "No Python from 3.10 to 3.13 with venv" in result.stderr
    assert "make PYTHON=" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_script_is_executable():
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR


# --- files ---


def test_no_file_names_a_place_of_this_machine():
    """Neither the checkout, nor the folder around it, nor the home folder, nor the interpreter's."""
    places = {ROOT, ROOT.parent, Path(pwd.getpwuid(os.getuid()).pw_dir), Path(sys.prefix), Path(sys.base_prefix)}
    common = {Path("/"), Path("/usr"), Path("/usr/local"), Path(os.environ["PYTEST_DEBUG_TEMPROOT"])}
    common |= {Path(tempfile.gettempdir()), Path("/root")}  # where Flyte puts a pod's code
    pattern = re.compile("|".join(rf"(?<![\w.$}}-]){re.escape(str(place))}(?![\w.-])" for place in places - common))
    found = {}
    for file in _project_files():
        hits = pattern.findall(file.read_text(errors="replace"))
        if hits:
            found[str(file.relative_to(ROOT))] = sorted(set(hits))
    assert not found


def test_relative_links_resolve():
    broken = []
    for page in _project_files():
        if page.suffix != ".md":
            continue
        prose = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(<?([^)\s>]+)", prose):
            if re.match(r"[a-z][a-z0-9+.-]*:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists():  # the project for Flyte 2 has most of its files from the common template
                target = Path(str(target).replace("new/flyte2/template", "new/template"))
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_our_files_that_pages_name_exist():
    files = _project_files()
    names = {file.name for file in files}
    folders = "flyte_ddp|tests|benchmarks|scripts|docs|examples|workflows|presets"
    missing = []
    for page in files:
        if page.suffix == ".md" and "template" not in page.parts:
            text = page.read_text()
            paths = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]*\w)", text)
            missing += [path for path in paths if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()]
            missing += [name for name in re.findall(r"\btest_\w+\.py\b", text) if name not in names]
    assert not missing


def test_the_table_of_collectives_has_every_file_that_calls_one():
    names = (
        "all_reduce|all_gather|reduce_scatter|broadcast|gather_object|barrier|send|recv|new_group|init_process_group"
    )
    ours = "broadcast_value|broadcast_tensor|broadcast_in_place|gather_values|all_reduce_flags"
    call = re.compile(rf"distributed\.(?:{names})\w*\(|(?<!def )\b(?:{ours})\(")
    files = [file for file in _project_files() if file.suffix == ".py" and ROOT / "flyte_ddp" in file.parents]
    calling = {file for file in files if call.search(file.read_text())}
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Collectives")[2].partition("\n## ")[0]
    listed = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", table)}
    assert len(calling) > 15
    assert calling <= listed


def test_files_are_small():
    big = [str(file.relative_to(ROOT)) for file in _project_files() if file.stat().st_size > 1_000_000]
    assert not big
