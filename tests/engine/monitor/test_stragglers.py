"""Which ranks are said to be slow."""

import platform

import numpy as np
import pytest

from benchmarks.gpu_rows.training import train
from benchmarks.slowed_settings import SLOWED, Settings
from flyte_ddp.engine.batches.block_split import BlockSplit
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.stragglers import MOST_WARNINGS, Stragglers
from flyte_ddp.events import Event, NotLearning, RanksTimed, SlowRank
from flyte_ddp.launch.environment import World

STEPS = 10  # in each log


def times(*each, samples=None):
    """(seconds for data, seconds of computing) of each rank; they wait for the slowest."""
    most = max(map(sum, each))
    samples = samples or [320] * len(each)
    rows = zip(each, samples, strict=True)
    return np.array([(data, computing, most - data - computing, n) for (data, computing), n in rows])


def judge(*logs, meet_within=False):
    """What is said after each log, as (rank, cause)."""
    stragglers = Stragglers([f"host{rank}" for rank in range(len(logs[0]))], "look at it", meet_within)
    return [
        [(slow.rank, slow.cause) for slow in stragglers.after_steps(0, number * STEPS, STEPS, log)]
        for number, log in enumerate(logs, 1)
    ]


FINE, IN_DATA, IN_STEP = (0.1, 1.0), (1.6, 1.0), (0.1, 2.0)


def test_ranks_that_are_slow_alike_are_not_told():
    assert judge(*[times(IN_DATA, IN_DATA, IN_STEP)] * 5) == [[]] * 5


def test_most_of_a_few_ranks_may_be_slow():
    assert judge(*[times(IN_DATA, FINE, IN_STEP)] * 3)[-1] == [(0, "data"), (2, "compute")]
    assert judge(*[times(IN_DATA, IN_DATA, FINE, IN_DATA)] * 3)[-1] == [(0, "data"), (1, "data"), (3, "data")]


def test_the_remedy_is_one_of_the_data():
    stragglers = Stragglers(["a", "b"], BlockSplit.remedy)
    *_, (slow,) = (stragglers.after_steps(0, 10 * log, STEPS, times(FINE, IN_DATA)) for log in (1, 2, 3))
    assert slow.reason.endswith("raise threads of Blocks")
    assert "loader_workers" not in slow.reason


def test_a_rank_that_is_slow_in_its_data_is_told_once_at_the_third_log_and_not_those_that_wait_for_it():
    log = times(FINE, IN_DATA, FINE, FINE)
    assert log[:, 2].tolist() == [1.5, 0.0, 1.5, 1.5]
    assert judge(*[log] * 6) == [[], [], [(1, "data")], [], [], []]


@pytest.mark.parametrize(("slow", "cause"), [(IN_DATA, "data"), (IN_STEP, "compute")])
def test_of_two_ranks_either_may_be_the_slow_one(slow, cause):
    assert judge(*[times(slow, FINE)] * 3)[-1] == [(0, cause)]
    assert judge(*[times(FINE, slow)] * 3)[-1] == [(1, cause)]


def test_two_slow_ranks_with_different_causes():
    assert judge(*[times(IN_STEP, FINE, FINE, FINE, IN_DATA)] * 3)[-1] == [(0, "compute"), (4, "data")]


def test_one_of_512_ranks_by_its_host_with_figures_and_a_remedy():
    stragglers = Stragglers([f"node-{rank // 8}" for rank in range(512)], "look at it")
    log = times(*[FINE] * 300, (0.1, 1.3), *[FINE] * 211)
    for step in (10, 20):
        assert stragglers.after_steps(1, step, STEPS, log) == []
    (slow,) = stragglers.after_steps(1, 30, STEPS, log)
    assert (slow.epoch, slow.step, slow.rank, slow.host, slow.cause) == (1, 30, 300, "node-37", "compute")
    assert slow.reason.startswith(
        "rank 300 on node-37 is slow: it computes 130.0 ms in each step, a fast rank 100.0 ms "
        "(30 steps until step 30 of epoch 2): look for"
    )


@pytest.mark.parametrize(("has_gpus", "named"), [(False, [0]), (True, [0, 1])])
def test_on_cpus_the_ranks_of_a_host_are_slow_for_one_reason_and_no_gpu_is_suspected(has_gpus, named):
    stragglers = Stragglers(["laptop"] * 2, "look at it", has_gpus=has_gpus)
    logs = [times(IN_STEP, FINE)] * 3 + [times(FINE, IN_STEP)] * 3
    said = [slow for step, log in enumerate(logs) for slow in stragglers.after_steps(0, step, STEPS, log)]
    assert [slow.rank for slow in said] == named
    assert {"GPU" in slow.reason for slow in said} == {has_gpus}


def test_a_rank_within_a_quarter_of_a_fast_one_is_not_slow():
    assert judge(*[times(FINE, FINE, (0.1, 1.25))] * 5) == [[]] * 5


def test_two_slow_logs_do_not_make_three():
    slow, fine = times(FINE, IN_DATA), times(FINE, FINE)
    assert judge(slow, slow, fine, slow, slow, fine) == [[]] * 6


def test_a_rank_that_is_slow_in_turns_is_told_by_what_was_worse():
    assert judge(times(FINE, IN_DATA), times(FINE, IN_STEP), times(FINE, IN_DATA))[-1] == [(1, "data")]


def test_a_rank_that_becomes_slow_in_something_else_is_told_again():
    data, step = times(FINE, IN_DATA), times(FINE, IN_STEP)
    fine = times(FINE, FINE)
    assert judge(data, data, data, fine, step, step, step)[2::4] == [[(1, "data")], [(1, "compute")]]


def test_a_resumed_training_counts_anew():
    log = times(FINE, IN_DATA)
    before, after = judge(log, log), judge(log, log)
    assert before == after == [[], []]


def test_short_steps_and_short_hiccups_are_not_told():
    assert judge(*[times((0.0, 0.010), (0.015, 0.010))] * 1000) == [[]] * 1000  # 2.5 ms a step after 1 ms
    hiccup, fine = times((0.0, 0.1), (0.4, 0.1)), times(FINE, FINE)
    assert judge(*[hiccup] * 4, fine, *[hiccup] * 4, fine) == [[]] * 10  # 2 s each


def test_of_short_logs_it_takes_those_of_three_seconds():
    assert judge(*[times((0.0, 0.1), (0.4, 0.1))] * 6) == [[], [], [], [], [], [(1, "data")]]
    wavering = [times((0.0, 0.1), (0.0, 0.1)), times((0.0, 0.1), (0.4, 0.1))]  # the first breaks no row
    assert judge(*wavering * 6)[-1] == [(1, "data")]


def test_larger_shares_may_take_longer():
    assert judge(*[times((0, 1.0), (0, 2.0), samples=[10, 20])] * 5) == [[]] * 5
    assert judge(*[times((0, 1.0), (0, 2.6), samples=[10, 20])] * 3)[-1] == [(1, "compute")]
    assert judge(*[times((0, 1.0), (0, 1.0), samples=[10, 20])] * 5) == [[]] * 5  # nor must smaller ones be faster


def test_ranks_that_meet_while_they_compute_are_told_by_their_data_alone():
    log = np.array([(0.0, 2.6, 0.1, 320), (1.6, 1.0, 0.1, 320), (0.0, 2.5, 0.2, 320)])
    assert judge(*[log] * 3, meet_within=True)[-1] == [(1, "data")]
    in_step = np.array([(0.1, 2.6, 0.1, 320)] * 3)  # whichever it is, it takes all of them
    assert judge(*[in_step] * 5, meet_within=True) == [[]] * 5


def test_a_large_world_that_is_slow_does_not_fill_the_page():
    said = judge(*[times(*[FINE] * 300, *[IN_DATA] * 212)] * 5)
    assert sum(map(len, said)) == MOST_WARNINGS


def test_times_are_summed_up_over_the_attempt():
    stragglers = Stragglers(["a", "b"], "look at it")
    stragglers.after_steps(0, 10, STEPS, times((0.5, 1.0), (0.0, 1.0)))
    stragglers.after_steps(0, 20, STEPS, times((0.5, 1.0), (0.0, 2.0)))
    found = stragglers.so_far()
    assert found == RanksTimed(data=[1.0, 0.0], computing=[2.0, 3.0], waiting=[0.5, 0.5], waited_for=[0.5, 0.5])


def test_warnings_of_both_kinds_outlive_a_resume():
    watch, again = LossMonitor(), LossMonitor()
    watch.warnings = [NotLearning(0, 1, "it leapt"), SlowRank(0, 30, "slow", 1, "host", "data")]
    again.load_state_dict(watch.state_dict())
    assert again.warnings == watch.warnings


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "slow", "way", "cause"), [(2, 0, "data", "data"), (3, 2, "forward pass", "compute")])
def test_a_training_names_its_slow_rank(ranks, slow, way, cause):
    """Batch norm has the others wait in the middle of a step, too."""
    settings = Settings(way=way, rank=slow, milliseconds=60, batch_size=256, width=8, epochs=2)
    events: list[Event] = []
    results = train(SLOWED, settings, World(ranks, ranks, "gloo", "cpu"), on_event=events.append)
    (named,) = (event for event in events if isinstance(event, SlowRank))
    assert (named.rank, named.host, named.cause) == (slow, platform.node(), cause)
    assert all(named in result.warnings for result in results)
    timed = [event for event in events if isinstance(event, RanksTimed)][-1]
    assert timed.waited_for.index(max(timed.waited_for)) == timed.waiting.index(min(timed.waiting)) == slow
    asked = 64 * settings.milliseconds / 1e3
    assert (timed.data if cause == "data" else timed.computing)[slow] >= asked
