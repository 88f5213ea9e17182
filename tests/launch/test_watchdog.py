"""Ranks that watch over themselves: who hangs, who is gone, and what is said of it."""

import atexit
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flyte_ddp.errors import InputError
from flyte_ddp.launch import watchdog as module
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.failures import PreemptedError, RankError
from flyte_ddp.launch.hangs import Answer, report_hang
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.launch.phases import STARTING, STEPPING, WRITING, Timeouts
from flyte_ddp.launch.signals import finishing
from flyte_ddp.launch.watchdog import RollCall, under_watchdog
from tests.launch.targets import started

IN_REDUCE = Answer(9, True, "gloo:all_reduce of Float [8]", "in all_reduce\n")
BEHIND = Answer(8, True, "gloo:broadcast of Int [3]", "in forward\n")
HOSTS = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Without this each test would take as long as a stopped rank is given to answer."""
    for name, seconds in {"ANSWER_SECONDS": 0.3, "GRACE_SECONDS": 1.0, "ALIVE_SECONDS": 0.02}.items():
        monkeypatch.setattr(module, name, seconds)


@dataclass(frozen=True)
class Pretended(Environment):
    """A rank on one of two hosts."""

    @property
    def host(self):
        return HOSTS[self.rank]


def environment(rank, size=4, init_method=""):
    return Pretended(World(size, min(size, 2), "gloo", "cpu"), rank, rank % 2, init_method, 1)


def roll_calls(store, answers):
    """One for each rank; those that stand still have only said, when they began, where they are."""
    for rank, answer in enumerate(answers):
        if answer == Answer():
            store.set(f"host {rank}", HOSTS[rank])
    return [pretend(store, rank, answer) for rank, answer in enumerate(answers) if answer != Answer()]


def pretend(store, rank, answer):
    return RollCall(store, environment(rank), Timeouts(60), lambda: answer)


def found_by(calls):
    found = [call.finding.result(30) for call in calls]
    for call in calls:
        call.close()
    assert all(one == found[0] for one in found), "the ranks tell different stories"
    return found[0]


@pytest.mark.parametrize("asks", [0, -1])
def test_a_rank_that_stands_still_is_named_with_its_host(asks):
    calls = roll_calls(HashStore(), [IN_REDUCE, IN_REDUCE, Answer(), IN_REDUCE])
    calls[asks].ask("hang")
    found = found_by(calls)
    assert str(found.failure).startswith(
        "rank 2 on node-b: Hang: no step within timeout_seconds (60); the others wait in gloo:all_reduce of Float [8]; "
    )
    assert found.silent == "rank 2 on node-b does not answer"
    assert "ranks 0, 1:\non node-a, last collective gloo:all_reduce of Float [8]\nin all_reduce\n" in str(found.failure)
    assert "rank 2:\non node-b\ndoes not answer" in str(found.failure)


def test_of_ranks_that_can_all_tell_those_behind_are_named():
    calls = roll_calls(HashStore(), [IN_REDUCE, BEHIND, IN_REDUCE, BEHIND])
    for call in calls:
        call.ask("hang")
    failure = found_by(calls).failure
    assert (failure.rank, failure.others, failure.host) == (1, (3,), "node-a, node-b")
    assert "in forward" in failure.details


def test_a_rank_that_asked_and_then_stood_still_does_not_leave_the_others_waiting():
    store = HashStore()
    store.set("asked", "hang 0")
    failure = found_by(roll_calls(store, [Answer(), IN_REDUCE, IN_REDUCE, IN_REDUCE])).failure
    assert (failure.rank, failure.others, failure.host) == (0, (), "node-a")


def test_a_rank_that_never_said_anything_is_named_too():
    store = HashStore()
    calls = [pretend(store, rank, IN_REDUCE) for rank in (0, 2, 3)]
    calls[1].ask("hang")
    assert found_by(calls).silent == "rank 1 on unknown host does not answer"


def test_ranks_of_several_lost_hosts_are_all_named():
    calls = roll_calls(HashStore(), [IN_REDUCE, Answer(), Answer(), Answer()])
    calls[0].ask("loss")
    assert found_by(calls).silent == "rank 1 on node-a, rank 2 on node-b, rank 3 on node-b do not answer"


def test_a_rank_whose_work_has_succeeded_is_not_taken_for_a_silent_one():
    calls = roll_calls(HashStore(), [IN_REDUCE, BEHIND, IN_REDUCE, IN_REDUCE])
    calls[0].close(has_succeeded=True)
    calls[3].ask("hang")
    found = found_by(calls[1:])
    assert (found.failure.rank, found.failure.others, found.silent) == (1, (), "")


def test_a_fault_in_an_answer_is_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda caught: shown.append(caught.exc_value))
    call = RollCall(HashStore(), environment(0), Timeouts(60), raising(fault := RuntimeError("no stack")))
    call.ask("hang")
    call._thread.join()
    assert shown == [fault]


class StandsStill(HashStore):
    """As the client of a store whose process is stopped: not even a time-out ends a question to it."""

    def __init__(self):
        super().__init__()
        self.asked, self.over = threading.Event(), threading.Event()

    def check(self, keys):
        self.asked.set()
        self.over.wait()
        return True


def test_a_store_that_does_not_answer_speaks_against_its_keeper():
    store = StandsStill()
    store.set("host 0", "node-a")
    call = pretend(store, 3, IN_REDUCE)
    call.ask("hang")
    store.asked.wait()
    found = call.result()
    store.over.set()
    assert (found.failure.rank, found.failure.host, found.failure.others) == (0, "node-a", ())
    assert found.silent == "rank 0 on node-a does not answer"
    assert "nor does the store" in found.failure.details


def alone(tmp_path):
    return environment(0, size=1, init_method=f"file://{tmp_path}/store")


def test_the_value_or_the_error_of_the_work_comes_back(tmp_path):
    assert under_watchdog(lambda store: 7, DirectLink(None), alone(tmp_path), Timeouts(60)) == 7
    with pytest.raises(InputError, match="mine"):
        under_watchdog(raising(InputError("mine")), DirectLink(None), alone(tmp_path), Timeouts(60))
    with pytest.raises(RankError, match=r"^rank 0 on node-a: SystemExit\n\n"):  # else the process ended with status 0
        under_watchdog(raising(SystemExit()), DirectLink(None), alone(tmp_path), Timeouts(60))


def raising(error):
    def work(*store):
        raise error

    return work


def test_work_that_never_ends_is_left_behind_with_its_stack(tmp_path):
    over = threading.Event()

    def in_an_endless_loop(store):
        while not over.is_set():
            pass

    try:
        with pytest.raises(RankError) as failed:
            under_watchdog(in_an_endless_loop, DirectLink(None), alone(tmp_path), Timeouts(0.1))
    finally:
        atexit.unregister(os._exit)
        over.set()
    assert failed.value.failure.kind == "hang"
    assert "in in_an_endless_loop" in failed.value.failure.details


@pytest.mark.parametrize(
    ("has_started", "said"),
    [
        (False, "ended at once, before the first step"),
        (True, "killed as the grace of 1 s ends, .* before epoch 2, step 1;"),
    ],
)
def test_a_rank_that_is_asked_to_stop_ends_at_once_before_its_first_step_else_with_its_grace(
    tmp_path, monkeypatch, has_started, said
):
    monkeypatch.setenv("DDP_GRACE_SECONDS", "1")
    link, over = DirectLink(lambda event: None), threading.Event()

    def goes_on(store):
        if has_started:
            link.emit(started(first_epoch=1))
        os.kill(os.getpid(), signal.SIGTERM)
        over.wait()

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(PreemptedError, match=f"^{said}"):
            under_watchdog(goes_on, link, alone(tmp_path), Timeouts(60), [signal.SIGTERM])
        assert link.until < time.monotonic() + 1, "an upload is not waited for any longer than the grace"
    finally:
        signal.signal(signal.SIGTERM, before)
        atexit.unregister(os._exit)
        over.set()


def waits_for_rank_0(port):
    with finishing() as finish_first:
        finish_first()  # as rank 0 of many nodes does before it starts
        one = environment(1, size=2, init_method=f"tcp://127.0.0.1:{port}")
        under_watchdog(lambda store: None, DirectLink(None), one, Timeouts(60), [signal.SIGTERM])


def test_a_rank_that_waits_for_the_others_is_ended_by_a_sigterm():
    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        process = get_context("fork").Process(target=waits_for_rank_0, args=(server.getsockname()[1],))
        process.start()
        with server.accept()[0]:
            process.terminate()
            process.join(10)
            exit_code = process.exitcode
    process.kill()
    assert exit_code == -signal.SIGTERM


def test_steps_keep_a_rank_from_being_taken_for_one_that_hangs(tmp_path):
    link = DirectLink(None)

    def steps(store):
        for _ in range(100):
            link.heartbeat()
            threading.Event().wait(0.01)
        return "done"

    assert under_watchdog(steps, link, alone(tmp_path), Timeouts(0.5)) == "done"


def test_a_start_and_writing_may_take_longer_than_a_step_and_a_hang_in_them_is_said_to_be_one(tmp_path):
    link, over = DirectLink(None), threading.Event()

    def starts_and_writes(store):
        threading.Event().wait(0.5)
        for phase in (STEPPING, WRITING):
            link.heartbeat(phase)
        threading.Event().wait(0.5)

    def hangs(store):
        link.heartbeat(WRITING)
        over.wait()

    under_watchdog(starts_and_writes, link, alone(tmp_path), Timeouts(0.2, start=60, write=60))
    try:
        with pytest.raises(RankError, match=r"still writing .* after write_timeout_seconds .0.3.; the stacks"):
            under_watchdog(
                hangs, link, environment(0, 1, f"file://{tmp_path}/other"), Timeouts(0.2, start=60, write=0.3)
            )
    finally:
        atexit.unregister(os._exit)
        over.set()


def test_a_rank_that_does_not_answer_is_in_the_phase_of_the_others():
    starting = Answer(1, True, IN_REDUCE.collective, "", STARTING)
    failure = report_hang({0: starting, 1: Answer(), 2: starting}, HOSTS, Timeouts(300, start=1800))
    assert failure.rank == 1
    said = "still starting (data, network, checkpoint, first step) after start_timeout_seconds (1800)"
    assert failure.message.startswith(said)


def test_the_loss_of_a_rank_names_it_and_its_host(tmp_path):
    """As gloo says it, which knows an address at best."""

    def lose_rank_two(store):
        roll_calls(store, [Answer(), IN_REDUCE, Answer(), IN_REDUCE])  # rank 0 speaks for itself
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711")

    with pytest.raises(RankError) as failed:
        under_watchdog(
            lose_rank_two, DirectLink(None), environment(0, init_method=f"file://{tmp_path}/store"), Timeouts(60)
        )
    failure = failed.value.failure
    assert (failure.kind, failure.rank, failure.host) == ("peer", 0, "node-a")
    assert failure.message.endswith("; rank 2 on node-b does not answer")


def test_a_loss_that_is_the_end_of_a_hang_is_reported_as_the_hang(tmp_path):
    """A rank that knows of the hang ends, and gloo tells the next one before that has looked."""

    def lose_the_others(store):
        calls = roll_calls(store, [Answer(), IN_REDUCE, Answer(), IN_REDUCE])
        calls[0].ask("hang")
        calls[0].finding.result(30)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711")

    with pytest.raises(RankError) as failed:
        under_watchdog(
            lose_the_others, DirectLink(None), environment(0, init_method=f"file://{tmp_path}/store"), Timeouts(60)
        )
    failure = failed.value.failure
    assert (failure.kind, failure.rank, failure.host) == ("hang", 2, "node-b")


def test_ranks_whose_gpu_is_busy_come_before_those_that_are_idle_at_the_same_collective():
    failure = report_hang({0: IN_REDUCE, 1: Answer(9, False, IN_REDUCE.collective, "")}, HOSTS, Timeouts(5))
    assert (failure.rank, failure.others) == (1, ())


def test_where_all_have_come_equally_far_nobody_is_waited_for():
    failure = report_hang(dict.fromkeys(range(4), IN_REDUCE), HOSTS, Timeouts(5))
    assert (failure.rank, failure.others, failure.host) == (0, (1, 2, 3), "node-a, node-b")
    assert "wait in" not in failure.message


def test_of_many_ranks_the_stacks_of_those_that_are_waited_for_are_kept():
    answers = {rank: Answer(9, True, "", f"in step {rank}\n" * 100) for rank in range(500)}
    failure = report_hang(
        answers | {400: Answer(8, True, "", "the culprit\n")}, dict.fromkeys(range(500), "node"), Timeouts(5)
    )
    assert failure.rank == 400
    assert "the culprit" in failure.details
    assert len(failure.details) < 60_000, "each rank reads it, and Flyte does not read an error of megabytes"
