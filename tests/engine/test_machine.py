"""What a training has run on is known, and other hardware is told of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flyte_ddp.engine import worker
from flyte_ddp.engine.job import FINAL
from flyte_ddp.engine.machine import Place, moved, unlike
from flyte_ddp.events import NotLearning, RunStarted, digests_of

ROOT = Path(__file__).resolve().parents[2]
ONE = {"hardware": "CPU, AVX512", "torch": "2.9", "precision": "float32", "ranks": 2, "threads": 1}
ON_ANOTHER = """if True:
    import sys
    from flyte_ddp.settings import RunOptions
    from flyte_ddp.recipes.hyperparameters import Hyperparameters
    from flyte_ddp.training import train
    data, init, output = sys.argv[1:]
    hp = Hyperparameters(batch_size=16, epochs=2, precision="float32")
    train("flyte_ddp.recipes.images:ImageClassifier", hp, RunOptions(nproc=1, tracking="off"), data, output, init=init)
"""


def test_each_machine_is_kept_and_other_hardware_is_remarked_upon():
    assert moved([], ONE) == ([ONE], [])
    assert moved([ONE], dict(ONE)) == ([ONE], [])
    more = {**ONE, "ranks": 3}
    assert moved([ONE], more) == ([ONE, more], [])
    other = {**more, "hardware": "NVIDIA H100"}
    machines, (remark,) = moved([ONE, more], other)
    assert machines == [ONE, more, other]
    assert "other hardware (CPU, AVX512) than this (NVIDIA H100)" in remark


def test_a_training_that_goes_on_knows_what_it_ran_on_and_its_digests(whole, train):
    first = whole(2, epochs=2, stop_after=1)
    on = train(1, epochs=2, init=first.folder / FINAL)
    (begun,), (started,) = ([one for one in run.events if isinstance(one, RunStarted)] for run in (first, on))
    assert begun.ran_on == [{**begun.ran_on[0], "ranks": 2, "precision": "float32"}]
    assert begun.earlier == []
    assert begun.identity["settings"]["batch_size"] == 16
    assert started.ran_on[0] == begun.ran_on[0]
    assert [one["ranks"] for one in started.ran_on] == [2, 1]
    assert started.earlier == digests_of(first.result.epochs) == digests_of(on.result.epochs[:1])
    assert not any("hardware" in remark for remark in started.remarks)


@pytest.mark.slow
def test_a_checkpoint_of_other_hardware_is_told_of(whole, small_data, tmp_path):
    first = whole(2, epochs=2, stop_after=1)
    command = [sys.executable, "-c", ON_ANOTHER, str(small_data), str(first.folder / FINAL), str(tmp_path)]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "than this (CPU, DEFAULT): from here on, bits may differ" in done.stderr
    assert done.returncode == 0


FACTS = {"torch": "2.9", "cores": "16", "NVIDIA driver": "550.54"}


def many(**odd):
    """512 GPUs on 64 hosts; odd: attributes of the places of rank 300 and its host."""
    places = [Place(f"node-{rank // 8}", "GPU", "GPU", FACTS, 700.0) for rank in range(512)]
    return [place._replace(**odd) if place.host == "node-37" else place for place in places]


def test_hosts_alike_are_no_matter():
    assert unlike(many()) == unlike([Place("laptop", "CPU", "CPU", {"torch": "2.9"})]) == []
    assert unlike(many(teraflops=600.0)) == []


def test_an_odd_host_among_many_is_named_with_what_is_odd():
    old, none = ({**FACTS, "NVIDIA driver": "535.104"}, {"torch": "2.9", "cores": "16"})
    (reason,) = unlike(many(facts=old))
    assert reason.startswith("NVIDIA driver differ between hosts: node-37 has 535.104, others 550.54: an odd")
    (reason,) = unlike(many(facts=none))
    assert "node-37 has none, others 550.54" in reason
    assert len(unlike(many(facts={"torch": "2.8"}))) == 3


def test_slow_gpus_are_named_by_rank_and_of_many_only_some():
    (reason,) = unlike(many(teraflops=350.4, device="H100, GPU-1"))
    assert "rank 296 on node-37 (H100, GPU-1) has 350, rank 297 on" in reason
    assert "rank 299 on node-37 (H100, GPU-1) has 350 and 4 more, the median 700: an odd host" in reason


def run_with_one_core(environment, link, job):
    """Trains; rank 1 is on another host, which has one core."""
    if environment.rank == 1:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        type(environment).host = property(lambda self: "another")
    return worker.run(environment, link, job)


def test_a_training_says_it_before_its_first_step_and_in_its_result(train):
    trained = train(2, target=f"{__name__}:run_with_one_core")
    warnings = [event.reason for event in trained.events[:2] if isinstance(event, NotLearning)]
    (reason,) = warnings
    assert "cores differ between hosts: another has 1, others " in reason
    assert [warning.reason for warning in trained.result.warnings] == warnings
