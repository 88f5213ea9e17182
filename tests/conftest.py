"""Keeps the tests away from the user's own files, and hands them the real data sets where there are any."""

import gc
import os
import shutil
import sys
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import available_cores, default_variable
from flyte_ddp.launch.limits import usable_memory
from flyte_ddp.report.console import show_output

pytest_plugins = ["tests.small_training"]


def pytest_configure(config: pytest.Config) -> None:
    """Gives the session a home, data, runs and temporary files of its own, before any test module imports flytekit.

    flytekit's local cache is always ~/.flyte/local-cache, so the home folder has to move. Settings of Flyte, of
    trackers (keys too) and our own go out of the environment. Subprocesses inherit all this.
    """
    for name in list(os.environ):
        if name.startswith(("FLYTE", "WANDB_", "MLFLOW_", "DDP_", "XDG_")) and not name.startswith("DDP_TEST_"):
            del os.environ[name]
    # Failed tests' folders outlive the session, where pytest always puts them.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    place = Path(tempfile.mkdtemp(prefix="ddp-"))
    # At exit and late: multiprocessing keeps its sockets here until its own clean-up, which has priority -100
    Finalize(None, shutil.rmtree, args=(place,), kwargs={"ignore_errors": True}, exitpriority=-200)
    folders = {"HOME": "home", "DDP_DATA_DIR": "data", "DDP_RUNS_DIR": "runs", "TMPDIR": "tmp"}
    # Its list of fonts takes seconds to make, also for tests whose runs have homes of their own
    folders["MPLCONFIGDIR"] = "matplotlib"
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers have the session's
        folders["DDP_TEST_SHARED"] = "shared"
    for name, folder in folders.items():
        (place / folder).mkdir()
        os.environ[name] = str(place / folder)
    tempfile.tempdir = os.environ["TMPDIR"]  # which a test may set for its processes, and remove afterwards
    # `pyflyte` is the one beside this interpreter, also where the environment isn't activated.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that is started compiles our modules again
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # The tests share the cores: threads that spin until the others of their rank get one would waste most of the time
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if sys.version_info >= (3, 13):  # flytekit 1.16 has no default image for it
        os.environ["FLYTE_INTERNAL_IMAGE"] = "flyte-ddp-training:latest"


def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each core, since tests wait for processes that they start, if each worker has 3 GB of memory."""
    return max(1, min(2 * available_cores(), usable_memory() // 3_000_000_000))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come first, the files beside this one before others, as they take longest: at the end, one worker
    would do them alone."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.parent != Path(__file__).parent))


def pytest_collection_finish() -> None:
    """What has been imported stays: a search for garbage, as each training makes one, would look at all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def output() -> None:
    """What the library says is printed, as in a command."""
    show_output()


@pytest.fixture(scope="session", autouse=True)
def _fork_server(request: pytest.FixtureRequest) -> None:  # a name that no test's parameter has, or it would not run
    """The process that a session's ranks are forked from imports what else many of their recipes need, once."""
    modules = ["flyte_ddp.engine.worker", "tests.forked", "tests.small_training"]
    if any(item.get_closest_marker("slow") for item in request.session.items):
        modules += ["lightning.pytorch", "peft", "timm", "transformers.models.bert.modeling_bert"]
    # A rank sets the variable before it imports a recipe. Modules that are imported earlier read it here
    with default_variable("HF_HUB_OFFLINE", "1"):
        launcher.warm_up([*launcher.PRELOAD, *modules])


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder with the original files of real data sets: MNIST/raw/*.gz and so on. Skips where there is none."""
    if not os.environ.get("DDP_TEST_DATA"):
        pytest.skip("needs real data: DDP_TEST_DATA is not set")
    folder = Path(os.environ["DDP_TEST_DATA"]).resolve()
    assert folder.is_dir(), f"DDP_TEST_DATA must name a folder, got {folder}"
    return folder
