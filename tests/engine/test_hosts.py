"""What a training has run on is known; what is odd about its hosts, GPUs and links is told of before it begins."""

import itertools
import os
import re
import time
from dataclasses import replace

import pytest
import torch
from torch import distributed

from flyte_ddp.engine import worker
from flyte_ddp.engine.hosts import links, places
from flyte_ddp.engine.hosts.links import GPU_LINK, rings_of_hosts
from flyte_ddp.engine.hosts.places import Place, add_machine, check_disk
from flyte_ddp.engine.hosts.unlike import list_bad_hosts
from flyte_ddp.engine.hosts.unlike import list_oddities as reasons_of
from flyte_ddp.engine.job import FINAL, Subject, make_job
from flyte_ddp.errors import InputError, RecoverableError
from flyte_ddp.events import NotLearning, OddNodes, RunStarted, list_digests
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import RecoverableRankError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

ONE = {"hardware": "CPU, AVX512", "torch": "2.9", "precision": "float32", "ranks": 2, "threads": 1}
SUBJECT = Subject("module:Name", Hyperparameters(), "code", "data")


def test_each_machine_is_kept_and_other_hardware_is_remarked_upon():
    assert add_machine([], ONE) == ([ONE], [])
    assert add_machine([ONE], dict(ONE)) == ([ONE], [])
    more = {**ONE, "ranks": 3}
    machines, (remark,) = add_machine([ONE], more, 0)
    assert machines == [ONE, more]
    assert "from another number of ranks (2) than this (3): the result is not that" in remark
    assert "which only virtual_ranks would keep" in remark
    assert add_machine([ONE], more, 4) == ([ONE, more], [])
    other = {**more, "hardware": "NVIDIA H100"}
    machines, (remark,) = add_machine([ONE, more], other)
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
    assert started.earlier == list_digests(first.result.epochs) == list_digests(on.result.epochs[:1])
    assert not any("hardware" in remark for remark in started.remarks)


@pytest.mark.slow
def test_a_checkpoint_of_other_hardware_is_told_of(whole, train, monkeypatch):
    first = whole(2, epochs=2, stop_after=1)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # its ranks look it up when they first compute
    on = train(1, epochs=2, init=first.folder / FINAL)
    (started,) = (event for event in on.events if isinstance(event, RunStarted))
    (remark,) = (remark for remark in started.remarks if "hardware" in remark)
    assert "than this (CPU, DEFAULT): from here on, bits may differ" in remark


FACTS = {"torch": "2.9", "cores": "16", "NVIDIA driver": "550.54"}


def unlike(places):
    return reasons_of(places, RunOptions())


def many(**odd):
    """512 GPUs on 64 hosts; odd: attributes of the places of rank 300 and its host."""
    places = [Place(f"node-{rank // 8}", "GPU", "GPU", FACTS, {"TFLOPS": 700.0}) for rank in range(512)]
    return [place._replace(**odd) if place.host == "node-37" else place for place in places]


def test_hosts_alike_are_no_matter():
    assert unlike(many()) == unlike([Place("laptop", "CPU", "CPU", {"torch": "2.9"})]) == []
    assert unlike(many(figures={"TFLOPS": 600.0})) == []


def test_an_odd_host_among_many_is_named_with_what_is_odd():
    old, none = ({**FACTS, "NVIDIA driver": "535.104"}, {"torch": "2.9", "cores": "16"})
    (reason,) = unlike(many(facts=old))
    assert reason.startswith("NVIDIA driver differ between hosts: node-37 has 535.104, others 550.54: an odd")
    (reason,) = unlike(many(facts=none))
    assert "node-37 has none, others 550.54" in reason
    assert len(unlike(many(facts={"torch": "2.8"}))) == 3


def test_slow_gpus_are_named_by_rank_and_of_many_only_some():
    (reason,) = unlike(many(figures={"TFLOPS": 350.4}, device="H100, GPU-1"))
    assert "rank 296 on node-37 (H100, GPU-1) has 350, rank 297 on" in reason
    assert "rank 301 on node-37 (H100, GPU-1) has 350 and 2 more, the median 700: an odd host" in reason


def test_a_gpu_whose_product_has_other_bits_than_its_kind_s_is_named():
    places = many()
    places[300] = places[300]._replace(product=7)
    (reason,) = unlike(places)
    assert "has other bits on rank 300 on node-37 (GPU) than on most GPUs of its kind" in reason
    assert unlike(many(hardware="another", product=7)) == []
    (reason,) = unlike([Place("node-0", "GPU, 1", "GPU", product=7), Place("node-0", "GPU, 2", "GPU", product=8)])
    assert re.search(r"differs between rank 0 on .*, rank 1 on .* cannot be told which of them is wrong: try", reason)


def test_only_a_host_whose_own_hardware_is_odd_is_to_be_avoided():
    for odd in ({"figures": {"TFLOPS": 350.0}}, {"product": 7}, {"slow_by": "heat"}):
        assert list_bad_hosts(many(**odd)) == ["node-37"]
    elsewhere = {"facts": {**FACTS, "torch": "2.8"}, "clock": 100.0, "lacks": "/run is full", "link": 1.0}
    assert list_bad_hosts(many(**elsewhere)) == list_bad_hosts(many(hardware="another", product=7)) == []
    assert list_bad_hosts([Place("a", "GPU", "GPU", product=7), Place("b", "GPU", "GPU", product=8)]) == []
    with pytest.raises(RecoverableError) as refused:
        reasons_of(many(product=7), RunOptions(odd_hosts="refuse"))
    assert refused.value.bad_hosts == ("node-37",)


def run_with_odd_figures(environment, link, job):
    """Trains; rank 1 is on another node, which has little memory."""
    type(environment).host = property(lambda self: f"node-{self.rank}")
    vars(places)["measure_memory"] = lambda device: {"GiB of memory": 8.0 if environment.rank else 64.0}
    return worker.run(environment, link, job)


def test_nodes_with_odd_figures_are_told_to_the_parent_if_pods_know_their_names(train, monkeypatch):
    for name, expected in (("", []), ("node-0", [("node-1",)])):
        monkeypatch.setenv("DDP_NODE_NAME", name)
        events = train(2, target=f"{__name__}:run_with_odd_figures", epochs=1).events
        assert [event.nodes for event in events if isinstance(event, OddNodes)] == expected


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


def test_what_is_odd_can_be_refused_which_another_attempt_may_mend(train):
    refusing = RunOptions(odd_hosts="refuse")
    assert reasons_of(many(), refusing) == []
    with pytest.raises(RecoverableError, match=r"as odd_hosts says: torch differ .* alike; node-37: /run is full$"):
        reasons_of(many(facts={**FACTS, "torch": "2.8"}, lacks="/run is full")[295:297], refusing)
    with pytest.raises(RecoverableRankError, match=r"refused before .* cores differ between hosts: another has 1,"):
        train(2, target=f"{__name__}:run_with_one_core", odd_hosts="refuse")


def train_with_another_rate(environment, link, job):
    """As ranks that were started by two commands."""
    rate = 0.5 if environment.rank else job.settings.learning_rate
    return worker.run(environment, link, replace(job, settings=replace(job.settings, learning_rate=rate)))


def train_with_other_options(environment, link, job):
    options = replace(job.options, keep_best=environment.rank)
    return worker.run(environment, link, replace(job, options=options))


def train_with_other_code(environment, link, job):
    code = f"code of {environment.rank}"
    return worker.run(Elsewhere(**vars(environment)), link, replace(job, code_version=code))


class Elsewhere(Environment):
    host = property(lambda environment: f"node-{environment.rank}")


def train_with_another_torch(environment, link, job):
    vars(torch)["__version__"] = f"2.{environment.rank}"
    return train_with_other_code(environment, link, job)


def test_ranks_of_two_trainings_are_refused_and_another_torch_is_named(train):
    with pytest.raises(
        InputError, match=r"learning_rate must be the same on all ranks, .* rank 0 and 0.5 on rank 1 on"
    ):
        train(2, target=f"{__name__}:train_with_another_rate", epochs=1)
    with pytest.raises(InputError, match=r"keep_best must be the same on all ranks, got 0 on rank 0 and 1 on rank 1"):
        train(2, target=f"{__name__}:train_with_other_options", epochs=1, validation_fraction=0.1)
    with pytest.raises(InputError, match=r"code must be the same .* 'code of 0' on rank 0 and 'code of 1' on"):
        train(2, target=f"{__name__}:train_with_other_code", epochs=1)
    warnings = train(2, target=f"{__name__}:train_with_another_torch", epochs=1).result.warnings
    assert [re.sub(r" differ between hosts: .*", "", warning.reason) for warning in warnings] == ["torch", "code"]


def test_a_host_with_less_room_and_gpus_with_worse_links_are_named():
    less = {"GiB of memory": 100.0, "GiB of /dev/shm": 0.0625, "free GiB of GPU memory": 39.5, GPU_LINK: 20.0}
    usual = {"GiB of memory": 101.0, "GiB of /dev/shm": 64.0, "free GiB of GPU memory": 79.0, GPU_LINK: 190.0}
    places = [place._replace(figures=usual) for place in many()]
    assert unlike(places) == []
    places[23] = places[23]._replace(figures=less, device="H100")
    shared, memory, link = unlike(places)
    assert shared.startswith("GiB of /dev/shm differ: node-2 has 0.0625, the median 64: an odd host")
    assert memory.startswith("free GiB of GPU memory differ: rank 23 on node-2 (H100) has 39.5, the median 79")
    assert link.startswith("GB/s between GPUs of its host differ: rank 23 on node-2 (H100) has 20, the median 190")


def test_a_clock_that_is_off_a_gpu_that_is_hot_and_a_full_disk_are_named():
    places = [place._replace(clock=1e9 + rank / 1000) for rank, place in enumerate(many())]
    assert unlike(places) == []
    odd = [one._replace(clock=one.clock - 90, slow_by="heat", lacks="/run is full") for one in places[296:297]]
    clock, hot, full = unlike([*places[:296], *odd, *places[304:]])
    assert clock.startswith("clocks are off: node-37's by -90 s: an odd host")
    assert hot.startswith(
        "GPUs slow themselves down, and all wait for them: rank 296 on node-37 (GPU) by heat: look at"
    )
    assert full == "node-37: /run is full"


@pytest.mark.parametrize("hosts", [3, 4, 64])
def test_the_links_of_a_slow_host_are_named_among_few_and_many(hosts):
    """8 GPUs a host; one has a slow network card."""
    places = [Place(f"node-{rank // 8}", "GPU", product=1, link=40.0 - rank % 7) for rank in range(8 * hosts)]
    assert unlike(places) == []
    for rank in (5, 13):  # of node-0 and node-1: to node-1, and from there to node-2
        places[rank] = places[rank]._replace(link=4.0)
    assert unlike([place._replace(product=0) for place in places]) == []  # processes that share cores, not cards
    (reason,) = unlike(places)
    assert ": 4 from node-0 to node-1, 4 from node-1 to node-2, the best 34: an odd host" in reason


def on_four_hosts(environment, link, job):
    """Trains; each rank is on a host of its own, and what rank 1 exchanges takes a second."""
    type(environment).host = property(lambda self: f"host-{self.rank}")
    exchange = distributed.batch_isend_irecv

    def slowly(exchanges):
        if environment.rank == 1:
            time.sleep(1)
        return exchange(exchanges)

    vars(links)["batch_isend_irecv"] = slowly
    return worker.run(environment, link, job)


@pytest.mark.slow
def test_ranks_measure_their_links_and_name_those_of_a_slow_host(train):
    reasons = [
        warning.reason for warning in train(4, target=f"{__name__}:on_four_hosts", batch_size=106).result.warnings
    ]
    (reason,) = [one for one in reasons if "GB/s" in one]
    named = re.findall(r"from (host-\d) to (host-\d)", reason)
    assert named == [("host-0", "host-1"), ("host-1", "host-2")], reason


def test_each_link_of_a_ring_is_tried_once_and_no_rank_has_two_at_once():
    for size in range(2, 12):
        turns = [links._choose_turn(place, size) for place in range(size)]
        assert all(turn in (0, 1, 2) for turn in turns)
        assert all(one != other for one, other in itertools.pairwise([*turns, turns[0]])), turns
    assert rings_of_hosts(["a", "a", "b", "a", "b"]) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "a"], ["a"]])
def test_a_rank_that_has_no_like_on_another_host_has_no_slow_link(hosts):
    links = {"a": [1.0, 0.0], "b": [1.0]}
    places = [Place(host, "cpu", link=links[host].pop(0) if "b" in hosts else 0.0) for host in hosts]
    assert unlike(places) == []


def test_too_little_disk_for_the_weights_is_said(tmp_path):
    job = make_job(SUBJECT, RunOptions(), checkpoint_path=tmp_path / "not" / "yet" / "checkpoint")
    assert check_disk(job, 0) == check_disk(make_job(SUBJECT), 2**60) == ""
    reason = check_disk(job, 2**50)
    assert re.match(
        rf"{tmp_path} has [\d.,]+ GiB free, and the weights take 1,048,576 GiB, in a checkpoint and", reason
    )
    assert reason.endswith("choose another folder (DDP_RUNS_DIR)")
