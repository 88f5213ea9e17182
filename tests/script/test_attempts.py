"""Scripts that know nothing of this package, on a platform: resumed by their own checkpoints."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from flyte_ddp.manifest import read_manifest
from flyte_ddp.script import mirror
from flyte_ddp.settings import RunOptions
from tests.script.attempt import FolderScript, Node

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(mirror, "QUIET_SECONDS", 0.3)


def finish(root: Path, number: int, script: Path, *arguments: str, ranks: int = 2) -> tuple[dict, str]:
    """The outputs of an attempt that succeeds, and what it has said. Its ranks are those of a test: torch is there."""
    training = FolderScript(script, arguments)
    training.platform = Node(root, number)
    with redirect_stderr(io.StringIO()) as said:
        outputs = training.run(RunOptions(nproc=ranks, tracking="off"))
    return outputs, said.getvalue()


def test_a_script_with_the_trainer_of_transformers(tmp_path):
    """Whose checkpoint of one rank two ranks resume."""
    given = ["--output_dir", "$DDP_CHECKPOINT_DIR", "--save_steps", "2"]
    finish(tmp_path, 0, HERE / "with_transformers.py", *given, "--max_steps", "2", ranks=1)
    _, said = finish(tmp_path, 1, HERE / "with_transformers.py", *given, "--max_steps", "4")
    assert said.partition("resumes from ")[2].partition("\n")[0].endswith("/checkpoint-2"), said
    assert (tmp_path / "pod-1" / "checkpoints" / "checkpoint-4" / "model.safetensors").is_file()


def test_a_script_with_accelerate(tmp_path):
    finish(tmp_path, 0, HERE / "with_accelerate.py", "$DDP_CHECKPOINT_DIR", "1", ranks=1)
    _, said = finish(tmp_path, 1, HERE / "with_accelerate.py", "$DDP_CHECKPOINT_DIR", "2", ranks=1)
    assert "resumes from epoch 1\n" in said
    assert (tmp_path / "pod-1" / "checkpoints" / "checkpoints" / "checkpoint_1").is_dir()


SLOW = """
import os, pathlib, signal, sys, threading
place, stored = pathlib.Path(os.environ["DDP_CHECKPOINT_DIR"]), pathlib.Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("found", (place / "ckpt").read_text(), flush=True)
    if os.environ["RANK"] == "0":
        with open(os.environ["DDP_EVENTS"], "a") as events:
            events.write('{"step": 8, "loss": 0.5}\\n')
        (place / "last").write_text("written just before the end")
    sys.exit()
if os.environ["RANK"] == "0":
    with open(os.environ["DDP_EVENTS"], "a") as events:
        events.write('{"step": 7, "loss": 1.5}\\n')
    progress = pathlib.Path(os.environ["DDP_EVENTS"]).with_name("progress.jsonl")
    while '"step": 7' not in progress.read_text():
        threading.Event().wait(0.05)
    (place / "ckpt").write_text("the whole of it")
    while not stored.exists():
        threading.Event().wait(0.05)
    file = open(place / "ckpt", "w")
    file.write("the wh")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
threading.Event().wait()
"""


def test_a_rank_that_is_killed_while_it_writes_its_checkpoint_finds_the_one_before(tmp_path):
    (tmp_path / "train.py").write_text(SLOW)
    stored = tmp_path / "0" / "checkpoints" / "checkpoint"
    outputs, said = finish(tmp_path, 0, tmp_path / "train.py", str(stored))
    assert "the ranks start again from the checkpoint: rank 0 on " in said
    assert "SIGKILL" in said
    assert "[rank 1] found the whole of it\n" in said
    assert "resuming from the checkpoint\n" in said
    assert outputs["figures"] == {"loss": 0.5}
    manifest = read_manifest(stored)
    assert manifest is not None
    assert {*manifest["objects"]} == {"ckpt", "last"}, "at the end all is taken"
    assert "found the whole" in (tmp_path / "0" / "logs" / "rank-0.log").read_text()
