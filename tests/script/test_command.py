"""python -m flyte_ddp script: what a script gets, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flyte_ddp.__main__ import main
from tests.commands import ROOT


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Writes a script and runs it on two ranks, in a folder of its own; the status, and what was said."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, *arguments: str, before: tuple[str, ...] = (), name: str = "train.py") -> tuple[int, str]:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
        result = CliRunner().invoke(main, ["script", "--nproc", "2", *before, name, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output

    return call


SEEN = """
import json, os, sys
from neighbour import WORD
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"]
seen = {name: os.environ[name] for name in names}
seen |= {"argv": sys.argv, "name": __name__, "file": __file__, "first": sys.path[0], "word": WORD, "cwd": os.getcwd()}
seen |= {"port": int(os.environ["MASTER_PORT"]), "run": os.environ["TORCHELASTIC_RUN_ID"]}
with open(os.path.join(os.environ["DDP_CHECKPOINT_DIR"], os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
"""


def test_a_script_gets_what_torchrun_would_give_it(run, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbour.py").write_text("WORD = 'beside it'\n")
    given = ["--name", "two words", "-x", "--", "--nproc", "7", "--out=$DDP_CHECKPOINT_DIR/x", "$HOME"]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    status, said = run(SEEN, *given, name="sub/train.py")
    assert status == 0, said
    zero, one = (json.loads((tmp_path / "trained" / "checkpoints" / str(rank)).read_text()) for rank in (0, 1))
    assert (zero["RANK"], one["RANK"], one["LOCAL_RANK"]) == ("0", "1", "1")
    assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["GROUP_RANK"]) == ("2", "2", "0")
    assert zero["port"] == one["port"] > 0
    assert zero["run"] == one["run"] != ""
    filled = [*given[:-2], f"--out={tmp_path}/trained/checkpoints/x", "$HOME"]
    assert one["argv"] == [f"{tmp_path}/sub/train.py", *filled]
    assert (one["name"], one["file"]) == ("__main__", f"{tmp_path}/sub/train.py")
    assert (one["first"], one["word"], one["cwd"]) == (f"{tmp_path}/sub", "beside it", str(tmp_path))


FAILS = """
import os, threading
def compute():
    raise ValueError("broken batch")
if os.environ["RANK"] == "1":
    print("about to fail")
    compute()
threading.Event().wait()
"""


def test_a_rank_that_fails_is_named_with_the_scripts_own_traceback(run, tmp_path):
    status, said = run(FAILS)
    assert status == 1
    assert re.search(r"rank 1 on \S+: ValueError: broken batch", said), said
    assert f'File "{tmp_path}/train.py", line 4, in compute' in said
    assert "launch/rank.py" not in said
    assert "about to fail" in (tmp_path / "trained" / "rank-1.log").read_text()
    assert "<title>Failed: training of train.py" in (tmp_path / "trained" / "report.html").read_text()


def test_an_exit_status_is_told_and_0_is_a_success(run):
    status, said = run("import os, sys\nsys.exit(3 if os.environ['RANK'] == '0' else None)\n")
    assert status == 1
    assert "SystemExit: the script has ended by sys.exit(3)" in said
    assert run("import sys\nsys.exit(0)\n")[0] == 0


def test_a_keyboard_interrupt_of_the_script_itself_is_a_failure(run):
    status, said = run("raise KeyboardInterrupt\n")
    assert status == 1
    assert "KeyboardInterrupt" in said


LATE = """
import atexit, os, pathlib, threading
place = pathlib.Path(os.environ["DDP_CHECKPOINT_DIR"])
begun = threading.Event()
def write():
    begun.wait()
    (place / f"thread-{os.environ['RANK']}").touch()
threading.Thread(target=write).start()
atexit.register(lambda: (place / f"exit-{os.environ['RANK']}").touch())
threading.Timer(0.2, begun.set).start()
"""


def test_a_script_ends_with_its_threads_and_exit_handlers(run, tmp_path):
    status, said = run(LATE)
    assert status == 0, said
    assert {path.name for path in (tmp_path / "trained" / "checkpoints").iterdir()} == {
        "thread-0", "thread-1", "exit-0", "exit-1",
    }  # fmt: skip


LEAVES = """
import atexit, multiprocessing, os, pathlib, sys, threading
place, rank = pathlib.Path(os.environ["DDP_CHECKPOINT_DIR"]), os.environ["RANK"]
if rank == "1" and sys.argv[1] != "0":
    threading.Event().wait()
multiprocessing.set_start_method("spawn")
assert multiprocessing.current_process().name == "MainProcess"
child = os.fork()
if child == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
log, events = open(place / f"log-{rank}", "w"), open(os.environ["DDP_EVENTS"], "w")
log.write("a line")
events.write('{"step": 1, "loss": 0.5}')
atexit.register(lambda: (place / f"exit-{rank}").touch())
if sys.argv[1] == "raise":
    raise LookupError("no such word")
if sys.argv[1] == "exit":
    sys.exit(3)
log.flush()
os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("how", "ends", "words"),
    [
        ("0", 0, "Finished"),
        ("3", 1, r"SystemExit: the script has ended by os\._exit\(3\)"),
        ("exit", 1, r"SystemExit: the script has ended by sys\.exit\(3\)"),
        ("raise", 1, "LookupError: no such word"),
    ],
)
def test_whatever_way_a_script_ends_is_pythons(run, tmp_path, how, ends, words):
    status, said = run(LEAVES, how)
    assert status == ends
    if ends:
        assert re.search(words, said), said
    checkpoints = tmp_path / "trained" / "checkpoints"
    logs = [path.read_text() for path in checkpoints.glob("log-*")]
    assert logs
    assert "a line" in logs, "without a flush of its own"
    assert any(checkpoints.glob("exit-*")) == (how in ("exit", "raise"))
    if how in ("exit", "raise"):
        assert "Step 1\tloss 0.5000\n" in said, "of a file that was never closed"


def test_a_script_that_saves_elsewhere_is_told_so_and_its_secrets_are_hidden(run, tmp_path):
    status, said = run("", "--api_key", "of-a-friend", "--out=${DDP_CHECKPOINT_DIR}")
    assert status == 0, said
    assert said.count("Warning: the script has saved nothing in $DDP_CHECKPOINT_DIR") == 2
    report = (tmp_path / "trained" / "report.html").read_text()
    assert "of-a-friend" not in said + report
    assert "--api_key" in report


TOLD = """
import os
with open(os.environ["DDP_EVENTS"], "a") as events:
    events.write('{"step": 10, "loss": 1.25, "lr": 0.001, "note": "first"}\\n')
    events.write("step 11: loss 1.2\\n")
    events.write('{"loss": 1.0}\\n')
    events.write('{"step": 20, "loss": 0.5, "huge": 1' + "0" * 400 + "}\\n\\n")
    events.write('{"step": 30, "loss": NaN, "accuracy": 0.75}')
"""


def test_lines_of_events_are_figures_of_the_report_and_of_trackers(run, tmp_path):
    status, said = run(TOLD, before=("--tracking", "tensorboard"))
    assert status == 0, said
    lines = [json.loads(line) for line in (tmp_path / "trained" / "progress.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["measures"]) for line in lines if line["event"] == "step"]
    assert steps == [
        (10, {"loss": 1.25, "lr": 0.001}), (20, {"loss": 0.5}), (30, {"loss": None, "accuracy": 0.75}),
    ]  # fmt: skip
    assert "Step 10\tloss 1.2500\tlr 0.001\n" in said
    warned = "Warning: a line of $DDP_EVENTS must be JSON with a step, such as "
    assert said.count(warned) == 2, "when it comes, and in the summary"
    assert "got 'step 11: loss 1.2'" in said
    report = (tmp_path / "trained" / "report.html").read_text()
    assert "<title>Finished: training of train.py" in report
    assert "epoch 1" not in report.lower()
    assert "per second, all ranks" not in report, "which the script has not told, either"
    (events,) = (tmp_path / "trained" / "tensorboard").glob("*/events.*")
    assert b"train/accuracy" in events.read_bytes()
    assert b"learning_rate" not in events.read_bytes(), "which the script has not told"


LOADS = """
import os
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(float(index * index))

def collate(samples):
    return torch.stack(samples)

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    total = torch.zeros(())
    for context in ("spawn", "fork"):
        for batch in DataLoader(Squares(), 4, num_workers=1, collate_fn=collate, multiprocessing_context=context):
            total += batch.sum()
    distributed.all_reduce(total)
    if distributed.get_rank() == 0:
        print("total", total.item())
    distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_loader_workers_that_are_spawned_or_forked_find_what_the_script_defines(run):
    status, said = run(LOADS)
    assert status == 0, said
    assert "[rank 0] total 560.0" in said


HANGS = """
import threading, torch
from torch import distributed
distributed.init_process_group("gloo")
distributed.all_reduce(torch.ones(1))
def wait_for_nothing():
    threading.Event().wait()
if distributed.get_rank() == 1:
    wait_for_nothing()
distributed.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_hang_names_the_rank_that_the_others_wait_for_and_where_it_is(run):
    status, said = run(HANGS, before=("--timeout-seconds", "10"))
    assert status == 1
    assert re.search(r"rank 1 on \S+: Hang: no collective, printed line or event for 10 s", said), said
    assert "wait_for_nothing" in said
    assert "the others wait in gloo:all_reduce" in said


SAVES = """
import os, pathlib, signal, sys, threading
place = pathlib.Path(os.environ["DDP_CHECKPOINT_DIR"])
def save(*_):
    threading.Event().wait(0.5)
    (place / "saved").write_text("whole")
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
else:
    def fail(*_):
        raise LookupError("told to stop")
    signal.signal(signal.SIGTERM, fail)
while True:
    signal.pause()
"""


def test_a_stop_is_handed_on_and_a_rank_that_saves_is_waited_for(tmp_path):
    (tmp_path / "train.py").write_text(SAVES)
    command = [sys.executable, "-m", "flyte_ddp", "script", "--nproc", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 1
    assert "SIGTERM: " in said
    assert "Traceback" not in said, "which is no error of the script"
    assert (tmp_path / "trained" / "checkpoints" / "saved").read_text() == "whole"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "script must be a Python file that is there, got '[^']*nothing.py'"),
        (["train"], "script must be a Python file, got '[^']*train': give the path of a file NAME.py"),
        (["wrong.py"], "wrong.py, line 1: "),
        (["--nproc", "-1", "wrong.py"], "--nproc"),
        (["--timeout-seconds", "0", "wrong.py"], "--timeout-seconds"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text("for in\n")
    (tmp_path / "train").write_text("")
    result = CliRunner().invoke(main, ["script", *arguments])
    assert result.exit_code == 2
    assert re.search(words, result.output), result.output
    assert not (tmp_path / "trained").exists()
