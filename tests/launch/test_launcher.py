"""One process per rank: started, listened to, and ended, whatever happens."""

import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import has_ended
from flyte_ddp.code.code_version import find_sources
from flyte_ddp.code.user_code import ENGINE
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointFailed, Printed
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, World, available_cores
from flyte_ddp.launch.failures import PreemptedError, RankError, RecoverableRankError
from flyte_ddp.launch.grace import Grace
from flyte_ddp.launch.phases import STARTING, STEPPING, WRITING, Timeouts
from flyte_ddp.launch.signals import stop_requests

TARGETS = "tests.launch.targets"


def launch(function, size=2, argument=None, timeout_seconds=60.0, on_event=lambda event: None):
    world = World(size=size, local_size=size, backend="gloo", device="cpu")
    return launcher.launch(f"{TARGETS}:{function}", world, argument, timeout_seconds, on_event)


@pytest.fixture(autouse=True)
def nothing_stays():
    before = set(Path(tempfile.gettempdir()).glob("ddp-*"))
    yield
    assert set(Path(tempfile.gettempdir()).glob("ddp-*")) == before


def test_values_come_back_by_rank_and_the_cores_are_shared_out():
    threads = max(1, available_cores() // 3)
    assert launch("report_rank", 3, "x") == [(rank, 3, threads, "x") for rank in range(3)]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_far_more_ranks_than_cores_are_told_of():
    cores = os.sched_getaffinity(0)
    said: list[str] = []
    try:
        os.sched_setaffinity(0, [min(cores)])
        for size in (8, 9):
            assert len(launch("report_rank", size, on_event=lambda event: said.append(event.doing))) == size
    finally:
        os.sched_setaffinity(0, cores)
    assert said == ["9 ranks, which take turns on 1 core: a lower nproc may be faster"]


@pytest.mark.parametrize("given", ["nosuch0", "lo,nosuch0"])
def test_a_network_interface_that_there_is_not_is_no_loss_of_a_peer(monkeypatch, given):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    with pytest.raises(InputError, match=rf"^GLOO_SOCKET_IFNAME must name .* \(.*\blo\b.*\), got '{given}': change it"):
        launch("fail_on_rank_one")


@pytest.mark.slow
def test_workers_import_no_flyte_no_trackers_no_plots_and_no_compiler(small_data):
    # In a process of its own, whose ranks are forked from a process that no other test has had import anything
    program = f"""
from benchmarks.engine import train
from flyte_ddp.recipes.hyperparameters import Hyperparameters
hp = Hyperparameters(batch_size=16, epochs=1)
for modules in train(hp, {str(small_data)!r}, 2, worker="{TARGETS}:list_modules"):
    print(*modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE).stdout
    ranks = [set(line.split()) for line in shown.decode().splitlines()]
    assert len(ranks) == 2
    for names in ranks:
        assert "torch" in names
        roots = {name.split(".")[0] for name in names}
        assert not roots & {"flytekit", "wandb", "torchvision", "matplotlib", "sklearn", "rich", "sympy", "tensorboard"}
        assert "torch._dynamo.convert_frame" not in names
        ours = {name for name in names if name.startswith("flyte_ddp.")}
        decisive = set(find_sources([*ENGINE, "flyte_ddp.recipes.images"]))
        around = {name for name in ours - decisive if not name.startswith("flyte_ddp.launch.")}
        # text is how a failure's words are printed
        assert around <= {"flyte_ddp.text"}, "they do not count, though ranks import them: state here why"


@pytest.mark.skipif(launcher.START_METHOD != "forkserver", reason="only forked ranks share what has been imported")
def test_ranks_collect_their_garbage_but_never_look_at_what_they_share():
    for collects, shared in launch("count_frozen"):
        assert collects
        assert shared > 100_000, "torch has more objects"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_a_step_does_not_fetch_its_memory_from_the_kernel(train):
    for faults in train(target=f"{TARGETS}:count_page_faults", batch_size=256, epochs=3):
        assert statistics.median(faults) < 300, "without worker.keep_freed_memory over a thousand"


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "turns"), [({}, "10000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")])
def test_threads_spin_briefly_unless_the_user_wants_otherwise(chosen, turns):
    program = (
        "import os; from tests.launch.test_launcher import launch\n"
        "print(*launch('read_variable', 1, 'GOMP_SPINCOUNT'), 'GOMP_SPINCOUNT' in os.environ)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment.update(chosen, PYTHONPATH=os.pathsep.join(sys.path))
    shown = subprocess.run([sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE).stdout
    assert shown.decode().split() == [turns, "False"]


def test_ranks_have_the_variables_of_now_and_not_of_the_first_launch(monkeypatch):
    monkeypatch.setenv("LEFT_OUT", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch("read_variable", 1, "LEFT_OUT") == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("LEFT_OUT")
    assert launch("read_variable", 1, "CUDA_VISIBLE_DEVICES") == ["1"]
    assert launch("read_variable", 1, "LEFT_OUT") == [None]


@pytest.mark.skipif(launcher.START_METHOD != "forkserver", reason="only that process has a socket")
def test_the_folder_of_temporary_files_may_have_a_long_path(tmp_path):
    (place := tmp_path / ("x" * 100)).mkdir()
    program = """
import tempfile
from flyte_ddp.launch.launcher import warm_up
warm_up([])
print(tempfile.gettempdir())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(place)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE).stdout
    assert shown.decode().strip() == str(place), "other files have room there"


def test_the_failure_of_a_rank_is_reported_with_its_type_message_and_traceback():
    with pytest.raises(RankError) as failed:
        launch("fail_on_rank_one", 3, "xyzzy")
    first_line = str(failed.value).splitlines()[0]
    assert first_line.startswith("rank 1 on ")
    assert first_line.endswith(": LookupError: no such word: xyzzy")
    assert 'raise LookupError("no such word: " + argument)' in str(failed.value)
    assert not isinstance(failed.value, RecoverableRankError)


def test_a_killed_rank_is_named_with_its_signal_and_worth_a_retry():
    with pytest.raises(RecoverableRankError, match=r"rank 1 on \S+: SIGKILL: probably out of memory; peak memory \d+"):
        launch("die_on_rank_one", 3)


def test_a_rank_that_has_ended_before_the_others_is_named():
    with pytest.raises(RankError, match=r"^rank 0 on \S+: \w+: rank 1 had ended before: .*gloo"):
        launch("return_on_rank_one", 2)


def test_lines_that_children_log_do_not_break_into_those_of_their_rank():
    words, events = "x" * 20_000, list[Any]()  # longer than what is sent at once
    launch("log_in_children", size=1, argument=words, on_event=events.append)
    assert len(events) == 100
    assert all(event.text == words for event in events)


def test_a_rank_that_is_killed_while_it_sends_has_ended_though_a_child_of_it_lives_on(tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    with pytest.raises(RecoverableRankError, match=r"^rank 0 on .*: SIGKILL"):
        launch("die_while_sending", size=1, argument=str(fifo))


def test_a_rank_that_prints_faster_than_observers_read_hides_no_failure(tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    events = list[Any]()

    def on_event(event):
        if not events:
            fifo.write_text("failed meanwhile")
        events.append(event)
        threading.Event().wait(0.001)

    with pytest.raises(RankError, match="LookupError: failed meanwhile"):
        launch("print_while_rank_one_fails", argument=str(fifo), on_event=on_event)
    assert len(events) < 2_500  # of 5,000


def test_a_hang_shows_the_stacks_of_all_ranks():
    with pytest.raises(RecoverableRankError) as failed:
        launch("hang_on_rank_one", timeout_seconds=2)
    report = str(failed.value)
    assert "no step within timeout_seconds (2)" in report
    assert re.search(r"rank 1 on .*; the others wait in gloo:barrier", report)
    _, hanging, waiting = re.split(r"rank \d:\n", report)
    assert "wait_for_ever" in hanging
    assert "barrier" in waiting


@pytest.mark.slow
def test_a_rank_that_ends_as_a_hang_is_found_is_no_error_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "ANSWER_SECONDS", 0)
    launcher.warm_up()
    world = World(1, 1, "gloo", "cpu")
    rank = launcher._Rank(Environment(world, 0, 0, "", 1), f"{TARGETS}:report_rank", None, str(tmp_path), "")
    rank.process.join()
    try:
        failure = launcher._error_of_hang([rank], Timeouts(1), lambda event: None)
    finally:
        rank.end()
    assert "Hang: still starting" in str(failure)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_stopped_while_it_sends_is_found_to_hang(monkeypatch):
    monkeypatch.setattr(launcher, "ANSWER_SECONDS", 0.1)

    def wait(event):
        while Path(f"/proc/{event.text}/stat").read_text().split()[2] != "T":
            threading.Event().wait(0.01)

    with pytest.raises(RankError, match=r"^rank 0 on \S+: Hang: "):
        launch("stop_while_sending", 1, timeout_seconds=0.3, on_event=wait)


def test_a_start_and_writing_may_take_longer_than_a_step():
    assert launch("take_time", argument=3, timeout_seconds=Timeouts(1.5, start=60, write=60)) == ["done"] * 2


@pytest.mark.parametrize(
    ("phase", "timeouts", "said"),
    [
        (STARTING, Timeouts(0.5, start=1, write=60), "still starting .* after start_timeout_seconds (1)"),
        (STEPPING, Timeouts(1, start=60, write=60), "no step within timeout_seconds (1)"),
        (WRITING, Timeouts(0.5, start=60, write=1), "still writing .* after write_timeout_seconds (1)"),
        (WRITING, Timeouts(1, start=60), "still writing .* after timeout_seconds (1)"),
    ],
)
def test_a_hang_is_named_with_what_its_ranks_were_doing(phase, timeouts, said):
    with pytest.raises(RecoverableRankError, match=f"ranks 0, 1 on .*: Hang: {re.sub('[()]', '.', said)}; the stacks"):
        launch("hang_in", argument=phase, timeout_seconds=timeouts)


def test_a_rank_of_another_host_than_the_first_asks_the_gpu_of_its_own():
    said: list[Any] = []
    world = World(size=4, local_size=1, backend="gloo", device="cpu")
    target = f"{TARGETS}:hang_beside_eight_gpus"
    with pytest.raises(RankError, match="no step within"):
        launcher.launch(target, world, None, Timeouts(0.1, start=60), said.append, first=3)
    assert [event.text for event in said] == ["GPU 0"]


def test_an_observer_that_raises_ends_all_ranks(tmp_path):
    def on_event(event):
        raise OSError("observer")

    with pytest.raises(OSError, match="observer"):
        launch("say_pids_and_wait", argument=str(tmp_path), on_event=on_event)
    assert all(has_ended(int((tmp_path / rank).read_text())) for rank in ("0", "1"))


PARENT = """
import os, signal, sys

def interrupt_clean_up(event, arguments):
    if event == "shutil.rmtree" and "ddp-" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt_clean_up)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
from tests.launch.test_launcher import launch
launch("say_pids_and_wait", argument=sys.argv[1], on_event=lambda event: print("waiting", flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
    ],
)
def test_no_process_and_no_folder_outlives_its_parent(tmp_path_factory, number, whole_group):
    """Nor one that is killed: engine/batches/test_loading.py."""
    folder = tmp_path_factory.mktemp("ranks")  # short: the path of a socket in it may have 107 characters
    place = folder / "a#b"  # the end of a path, if that were a URL
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(place)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "waiting\n"
    assert [path.name for path in folder.glob("a*")] == ["a#b"]
    if (number, whole_group, sys.platform) == (signal.SIGTERM, False, "linux"):
        suspend_and_resume(parent.pid, [int((folder / rank).read_text()) for rank in ("0", "1")])
    if whole_group:
        os.killpg(parent.pid, number)
    else:
        parent.send_signal(number)
    # the ranks, what they start, and torch's forkserver hold the pipes too: this returns when the last has ended
    _, errors = parent.communicate(timeout=60)
    assert all(has_ended(int((folder / rank).read_text())) for rank in ("0", "1"))
    assert list(place.glob("ddp-*")) == []
    assert {signal.SIGINT: "KeyboardInterrupt"}.get(number, f"{number.name}: ended at once") in errors


@pytest.mark.skipif(launcher.START_METHOD != "forkserver", reason="nothing is imported for all ranks")
def test_ctrl_c_while_torch_is_imported_is_an_interrupt_and_nothing_else(tmp_path):
    (tmp_path / "pressing.py").write_text("import os, signal\nos.killpg(0, signal.SIGINT)")
    program = f"""
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
world = World(size=2, local_size=2, backend="gloo", device="cpu")
launcher.launch("{TARGETS}:report_rank", world, None, 60.0, print, preload=["pressing"])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert ended.stderr.endswith("KeyboardInterrupt\n")
    assert ended.stderr.count("Traceback") == 1


def test_a_rank_that_alone_is_asked_to_stop_ends_the_run_as_a_preemption():
    with pytest.raises(PreemptedError, match="SIGTERM: stopped on request before epoch 1, step 5"):
        launch("stop_as_rank_one_is_asked_to")


@pytest.mark.parametrize(
    ("phase", "did"),
    [(STEPPING, "had not ended their step:"), (WRITING, "still wrote a checkpoint or results, for about 49 s more:")],
)
def test_at_the_end_of_the_grace_it_is_said_where_a_resume_begins(monkeypatch, with_hangups, phase, did):
    """While a checkpoint is written, no further signal changes anything."""
    monkeypatch.setenv("DDP_GRACE_SECONDS", "1")
    further = [signal.SIGINT, signal.SIGINT, signal.SIGHUP] if phase == WRITING else []

    def on_event(event):
        if event == CheckpointFailed("go on"):
            for number in (signal.SIGTERM, *further):
                signal.raise_signal(number)

    words = f"SIGTERM: killed as the grace of 1 s ends, in which ranks {did} .* a resume begins before epoch 2, step 5;"
    with pytest.raises(PreemptedError, match=words):
        launch("ignore_the_notice", 2, phase, on_event=on_event)


def test_ranks_of_another_host_than_the_first_have_the_grace_though_they_tell_of_no_start():
    def on_event(event):
        if isinstance(event, Printed):
            signal.raise_signal(signal.SIGTERM)

    world = World(size=2, local_size=1, backend="gloo", device="cpu")
    target = f"{TARGETS}:save_when_asked_to_stop"
    assert launcher.launch(target, world, None, 60, on_event, first=1) == ["saved"]


def test_after_a_loss_during_the_grace_an_upload_has_no_more_time_than_without():
    asked = []

    def on_event(event):
        if isinstance(event, Printed):
            asked.append(time.monotonic())
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(PreemptedError, match=r"SIGTERM: rank 0 on .*SIGKILL") as stopped:
        launch("die_when_asked_to_stop", 1, on_event=on_event)
    assert stopped.value.until <= asked[0] + Grace().seconds_of_upload()


@pytest.mark.parametrize("is_pressed_again", [False, True])
def test_after_ctrl_c_a_checkpoint_may_take_longer_than_the_grace_until_the_third_one(
    tmp_path, monkeypatch, is_pressed_again
):
    monkeypatch.setenv("DDP_GRACE_SECONDS", "1")
    asked: list[float] = []

    def on_event(event):
        if isinstance(event, Printed) and not asked:
            asked.append(time.monotonic())
            signal.raise_signal(signal.SIGINT)
        elif asked and time.monotonic() > asked[0] + 1 and is_pressed_again:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        elif asked and time.monotonic() > asked[0] + 1:
            (tmp_path / "end").touch()

    expected = pytest.raises(KeyboardInterrupt) if is_pressed_again else nullcontext()
    with expected:
        assert launch("write_until_told", 1, str(tmp_path / "end"), on_event=on_event) == ["written"]


@pytest.mark.parametrize("value", ["-1", "ten", "1.5", "3601", "9" * 5000, "٣"])
@pytest.mark.parametrize("variable", ["DDP_GRACE_SECONDS", "DDP_POD_GRACE"])
def test_a_grace_that_is_none_is_refused_before_the_start(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        InputError, match=f"^environment variable {variable} must be .* at most 3600, got '{value[:50]}'"
    ):
        launch("report_rank")


@pytest.mark.parametrize(
    ("user", "pod", "seconds"), [("", "", 30), ("0", "", 30), ("15", "120", 15), ("600", "120", 120), ("60", "", 60)]
)
def test_the_grace_is_the_smaller_one(monkeypatch, user, pod, seconds):
    for name, value in {"DDP_GRACE_SECONDS": user, "DDP_POD_GRACE": pod}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert Grace().seconds == seconds


@pytest.fixture
def with_hangups():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_only_a_second_ctrl_c_interrupts(with_hangups, second):
    """A pod's end may be forwarded by a parent and sent to the group, and a terminal's be followed by its shell's."""
    with stop_requests() as received:
        for number in (signal.SIGTERM, second, signal.SIGHUP):
            signal.raise_signal(number)
        assert received == [signal.SIGTERM, second, signal.SIGHUP]
        if second != signal.SIGINT:
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def suspend_and_resume(parent, ranks):
    """As Ctrl-Z and fg do: ranks stand still with their parent, and go on with it."""
    os.kill(parent, signal.SIGTSTP)
    os.waitpid(parent, os.WUNTRACED)
    for stopped in (True, False):
        for pid in ranks:
            while (Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T") != stopped:
                os.sched_yield()
        os.kill(parent, signal.SIGCONT)


def test_a_parent_that_stands_still_takes_no_rank_for_hung(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def on_event(event):
        threading.Event().wait(2 * timeout)
        fifo.write_text("done")

    timeout = 3 * launcher.POLL_SECONDS
    assert launch("wait_for_parent", 1, str(fifo), timeout, on_event) == ["done"]
