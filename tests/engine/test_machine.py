"""What a training has run on is known, and other hardware is told of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flyte_ddp.engine.job import FINAL
from flyte_ddp.engine.machine import moved
from flyte_ddp.events import RunStarted, digests_of

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
