"""The private parts that the launcher uses; tests/launch/test_hang.py has processes that hang or are abandoned."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import distributed, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.launch import launch_compat
from flyte_ddp.launch.hangs import Answer
from tests.commands import ROOT


def test_a_rank_counts_its_collectives_and_names_the_last(tmp_path):
    assert launch_compat.locate_rank(0) == Answer(0, True)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = launch_compat.locate_rank(0)
        distributed.all_reduce(torch.ones(2, 3))
        model = DistributedDataParallel(nn.Linear(1, 1))
        between = launch_compat.locate_rank(0)
        model(torch.ones(1)).backward()
        after = launch_compat.locate_rank(0)
    finally:
        distributed.destroy_process_group()
    assert before.reached < between.reached < after.reached
    assert after.is_idle
    assert after.collective == "gloo:all_reduce of Float [2]", "of the gradients of weight and bias"
    assert between.collective != after.collective


def test_collectives_are_counted_before_and_after_there_is_a_group(tmp_path):
    assert launch_compat.count_collectives() == 0
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = launch_compat.count_collectives()
        distributed.all_reduce(torch.ones(2))
        after = launch_compat.count_collectives()
        group = distributed.new_group([0])
        assert isinstance(group, distributed.ProcessGroup)
        distributed.all_reduce(torch.ones(2), group=group)
        of_a_subgroup = launch_compat.count_collectives()
    finally:
        distributed.destroy_process_group()
    assert before < after < of_a_subgroup
    assert launch_compat.count_collectives() == 0


ENDING = """if True:
    import atexit, os, threading, time
    from flyte_ddp.launch.launch_compat import run_exit_handlers
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread", flush=True))).start()
    atexit.register(print, "handler", flush=True)
    text, binary = open("text", "w"), open("binary", "wb")
    text.write("text")
    binary.write(b"binary")
    closed = open("closed", "w")
    closed.close()
    run_exit_handlers()
    os._exit(0)
"""


def test_exit_handlers_run_after_threads_and_open_files_are_flushed(tmp_path):
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["thread", "handler"], done.stderr
    assert [(tmp_path / name).read_text() for name in ("text", "binary", "closed")] == ["text", "binary", ""]


def test_the_stack_of_another_thread():
    go_on, begun = threading.Event(), threading.Event()

    def wait_here():
        begun.set()
        go_on.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    begun.wait()
    assert "in wait_here" in launch_compat.read_stack(thread.ident)
    go_on.set()
    thread.join()
    assert launch_compat.read_stack(thread.ident) == ""


def start_and_fail(place):
    (place / str(len(list(place.iterdir())))).touch()
    raise LookupError("no such word")


@pytest.mark.slow
def test_torchs_agent_starts_ranks_again_only_if_that_is_worth_it(tmp_path):
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, max_restarts=2, monitor_interval=0.1, start_method="fork",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="restarts",
    )  # fmt: skip
    asked = []

    def is_worth(failed):
        asked.append(failed.get_first_failure()[1].message)
        return len(asked) == 1

    with launch_compat.restarts_only(is_worth), pytest.raises(ChildFailedError):
        elastic_launch(config, start_and_fail)(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert all("no such word" in str(message) for message in asked)
