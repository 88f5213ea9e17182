"""A new project, made by an installed library in a folder that knows nothing of it, and used as its README says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flyte_ddp.__main__ import main
from scripts.dry_run import ROOT, read_package
from tests.environment import make_environment
from tests.flyte2.test_local import flyte_run
from tests.pod import IMAGE, container_of

TEMPLATE = ROOT / "flyte_ddp" / "new" / "template"
FEW_EPOCHS = """ARGS=--settings '{"epochs": 2}'"""


class User:
    """An environment that pip has installed the library into, from a copy of it, and an empty folder."""

    def __init__(self, place: Path):
        self.checkout, self.environment, self.home = place / "checkout", place / "environment", place / "home"
        self.home.mkdir()
        shutil.copytree(ROOT / "flyte_ddp", self.checkout / "flyte_ddp", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.checkout)
        make_environment(self.environment, has_pip=True)
        self.library = f"flyte-ddp-training @ file://{self.checkout}"
        self.install(self.library)

    def install(self, *what: str) -> None:
        # setuptools is there, and a test should not need the network
        done = self.run("python", "-m", "pip", "install", "--no-deps", "--no-build-isolation", *what)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str, cwd: "Path | None" = None, **variables: str) -> "subprocess.CompletedProcess[str]":
        outer = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS")}
        environment = {**outer, "PATH": f"{self.environment}/bin:{os.environ['PATH']}", **variables}
        return subprocess.run(command, cwd=cwd or self.home, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    return User(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def project(user):
    done = user.run("python", "-m", "flyte_ddp", "new", "flower_images")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Next:     make -C flower_images test run"
    folder = user.home / "flower_images"
    (folder / ".venv").symlink_to(user.environment)  # which `make` finds complete
    (folder / ".venv" / "stamp").touch()
    return folder


def new(*arguments, cwd, status=0):
    with pytest.MonkeyPatch.context() as here:
        here.chdir(cwd)
        done = CliRunner().invoke(main, ["new", *arguments])
    assert done.exit_code == status, done.output
    return done


# --- what it writes works ---


@pytest.mark.slow
def test_every_file_of_the_template_is_written_under_the_new_name(project):
    there = {str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()}
    templates = (file for file in TEMPLATE.rglob("*") if file.is_file() and file.suffix != ".pyc")
    assert there == {str(file.relative_to(TEMPLATE)).replace("my_project", "flower_images") for file in templates}
    assert not any("my_project" in (project / file).read_text() for file in there)
    assert len((project / "flower_images" / "recipe.py").read_text().splitlines()) <= 45


@pytest.mark.slow
def test_it_passes_its_own_test_and_trains_beside_other_workflows(user, project):
    done = user.run("make", "test", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    (project / "workflows").mkdir()  # which may not be taken for the library's own
    (project / "workflows" / "__init__.py").write_text("raise RuntimeError('another project')\n")
    done = user.run("make", "run", FEW_EPOCHS, cwd=project)
    shutil.rmtree(project / "workflows")
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"'accuracy': ([\d.]+)", done.stdout)[-1]) > 0.7


@pytest.mark.slow
def test_it_can_be_registered(user, project):
    done = user.run("make", "package", f"IMAGE={IMAGE}", cwd=project, DDP_PROFILE="sandbox")
    assert done.returncode == 0, done.stdout + done.stderr
    package = read_package((project / "package.tgz").read_bytes())
    assert set(package.workflows) == {"flower_images.workflow.flower_images_wf"}
    assert container_of(package.tasks["flower_images.workflow.train_flower_images"]).image == IMAGE


@pytest.mark.slow
def test_its_image_has_what_the_registered_code_is(project):
    dockerfile = (project / "Dockerfile").read_text()
    assert re.findall(r"^COPY (?:--\S+ )?(\S+) (\S+)", dockerfile, re.MULTILINE) == [
        ("flower_images", "./flower_images")
    ]
    kept = [line for line in (project / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert kept == ["!flower_images"]
    arguments = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    assert arguments == set(re.findall(r"--build-arg (\w+)=", (project / "Makefile").read_text()))


@pytest.mark.parametrize(("uv", "by_pip"), [("true", False), ("test $1 = --version", True), ("", True)])
def test_uv_installs_it_or_else_pip(tmp_path, uv, by_pip):
    """With stand-ins: a Python that lists its calls, and a uv that works, fails, or is missing."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(TEMPLATE / name, tmp_path)
    python = 'echo "$@" >>called; case "$*" in "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python;; esac'
    (tmp_path / "tools").mkdir()
    for name, program in {"python3": python, "uv": uv}.items():
        if program:
            (tmp_path / "tools" / name).write_text(f"#!/bin/sh\n{program}\n")
            (tmp_path / "tools" / name).chmod(0o755)
    path = f"{tmp_path}/tools:/usr/bin:/bin"
    done = subprocess.run(["make", ".venv/stamp"], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("-m pip install --editable .[dev]" in (tmp_path / "called").read_text().splitlines()) == by_pip


@pytest.mark.slow
def test_one_for_flyte_2_trains_by_its_sdk(tmp_path):
    named = "flyte-ddp-training[tensorboard] @ git+https://git.example/flyte-ddp.git@0123abc"
    new("flowers", "--flyte2", "--library", named, cwd=tmp_path)
    project = tmp_path / "flowers"
    assert requirement(project) == named.replace("[tensorboard]", "[flyte2,tensorboard]")
    assert not any("my_project" in file.read_text() for file in project.rglob("*") if file.is_file())
    file, task = re.findall(r"flyte run --local (\S+) (\S+) \$\(ARGS\)", (project / "Makefile").read_text())[0]
    said = flyte_run("--settings", '{"epochs": 2}', file=file, task=task, cwd=project)
    assert "Epoch 2 of 2: test accuracy" in said
    ours, theirs = (
        ROOT / "flyte_ddp" / "new" / place / "workflow.py"
        for place in ("flyte2/template/my_project", "template/my_project")
    )
    assert len(ours.read_text().splitlines()) <= len(theirs.read_text().splitlines())


# --- where the library comes from ---


def requirement(project: Path) -> str:
    (found,) = re.findall(
        r'^dependencies = \[\n    "(.*)",\n\]$', (project / "pyproject.toml").read_text(), re.MULTILINE
    )
    return str(found)


@pytest.mark.slow
def test_pip_installs_it_and_the_library_by_what_it_requires(user, project):
    assert requirement(project) == user.library, "by which it has been installed"
    user.install("--editable", str(project))
    done = user.run("python", "-c", "from importlib.metadata import requires; print(requires('flower_images')[0])")
    assert done.stdout.strip() == requirement(project)


def test_a_checkout_that_is_not_installed_names_itself(tmp_path):
    new("flowers", cwd=tmp_path)
    assert requirement(tmp_path / "flowers") == f"flyte-ddp-training @ {ROOT.as_uri()}"


@pytest.mark.parametrize("extras", ["", "[export,tensorboard]"])
def test_what_the_user_names_is_taken(tmp_path, extras):
    named = f"flyte-ddp-training{extras} @ git+https://git.example/flyte-ddp.git@0123abc"
    new("flowers", "--library", named, cwd=tmp_path)
    assert requirement(tmp_path / "flowers") == named


@pytest.mark.parametrize("named", ["another-package", "flyte-ddp-training @", 'flyte-ddp-training @ "'])
def test_what_is_no_requirement_of_the_library_is_refused(tmp_path, named):
    done = new("flowers", "--library", named, cwd=tmp_path, status=2)
    assert f"--library must be a requirement of flyte-ddp-training, got {named!r}" in done.stderr
    assert not any(tmp_path.iterdir())


# --- what is refused ---


@pytest.mark.parametrize("name", ["2fast", "my-project", "Flowers", "blüten", "a__b", "_hidden", "class", ".."])
def test_a_name_that_cannot_be_a_package_is_refused(tmp_path, name):
    done = new(name, cwd=tmp_path, status=2)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("Error: NAME must be a Python package name")
    assert said.endswith(f"got {name!r}: choose one like flower_images")
    assert not any(tmp_path.iterdir())


def test_a_name_that_is_too_long_for_a_file_is_refused(tmp_path):
    said = new("a" * 300, cwd=tmp_path, status=2).stderr.splitlines()[-1]
    assert "NAME must be a Python package name of at most 100 lower-case letters" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["random", "torch", "flyte_ddp", "tests"])
def test_a_name_that_would_hide_another_package_is_refused(tmp_path, name):
    done = new(name, cwd=tmp_path, status=2)
    assert f"got '{name}': choose one like my_{name}" in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "flowers").mkdir()
    done = new(str(tmp_path / "flowers"), cwd=ROOT, status=2)
    assert f"NAME must be a new folder, got {tmp_path / 'flowers'}" in done.stderr
    assert not any((tmp_path / "flowers").iterdir())


def test_where_writing_fails_nothing_is_left(tmp_path):
    command = ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh"]  # no file above 1 KiB
    command += [sys.executable, "-m", "flyte_ddp", "new", "flowers"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"cannot write to {tmp_path}" in done.stderr
    assert not any(tmp_path.iterdir())


def test_the_commands_are_listed():
    done = subprocess.run([sys.executable, "-m", "flyte_ddp", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"new +Create a project in a new folder\.", done.stdout)
