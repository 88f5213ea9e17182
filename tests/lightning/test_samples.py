"""Under Lightning, which samples each rank sees: orders, splits, samplers, also after a resume."""

import functools
import json
from typing import Any

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.events import RanksTimed
from tests.lightning.project import KilledError, at_checkpoint, kill, of, settings, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("project")]


@pytest.fixture(scope="module")
def whole(project, tmp_path_factory):
    """whole(data): an undisturbed training on these data, and its folder."""

    @functools.cache
    def once(data):
        folder = tmp_path_factory.mktemp(data)
        return train(folder, settings(epochs=2), "numerals.variants:Seen", f"numerals.loaders:{data}"), folder

    return once


def test_ranks_draw_the_same_orders_and_splits_and_their_own_numbers_in_steps(whole):
    trained, folder = whole("InTwo")
    seen = [json.loads((folder / "logs" / f"seen-{rank}").read_text()) for rank in range(2)]
    orders = []
    for split, count in {"train": 30, "validation 0": 24, "validation 1": 16}.items():
        for epoch in range(2):
            mine, others = (
                [index for *which, batch, _ in of_rank for index in batch if which == [split, epoch]]
                for of_rank in seen
            )
            assert len({*mine, *others}) == len(mine + others) == count, split
            orders.append(mine)
    assert orders[0] != orders[1], "each epoch has its own"
    drawn = [number for of_rank in seen for *_, number in of_rank]
    assert len({*drawn}) == len(drawn)
    assert trained.result.epochs[0].train["forked"] == 1, "a worker that imports torch anew costs seconds"
    assert trained.result.epochs[0].train["apart"] == 1, "workers share the offset of a file that was open before"
    times = of(RanksTimed, trained)[-1]
    assert len(times.data) == 2
    assert min(times.data) > 0
    reasons = [warning.reason for warning in trained.result.warnings]
    assert any(
        "loss is not shown for the validation, which logs loss/dataloader_idx_0" in reason for reason in reasons
    ), reasons


def seen_by(folder, *split):
    """What each rank has seen and drawn in these splits and epochs."""
    ranks = [json.loads((folder / "logs" / f"seen-{rank}").read_text()) for rank in range(2)]
    return [[one for one in rank if (one[0].split()[0], one[1]) in split] for rank in ranks]


@pytest.mark.parametrize("data", ["InTwo", "Sampled"])
def test_after_a_resume_samples_that_are_drawn_are_those_of_an_undisturbed_training(tmp_path, whole, data):
    of_two: Any = {
        "settings": settings(epochs=2),
        "module": "numerals.variants:Seen",
        "data": f"numerals.loaders:{data}",
    }
    with pytest.raises(KilledError):
        train(tmp_path / "killed", **of_two, on_event=at_checkpoint(1, kill))
    train(tmp_path / "killed", **of_two)
    second = ("train", 1), ("validation", 1)
    assert seen_by(tmp_path / "killed", *second) == seen_by(whole(data)[1], *second)


def test_what_a_sampler_of_the_users_draws_is_dealt_out(whole):
    _, folder = whole("Sampled")
    epochs = [
        [index for rank in seen_by(folder, ("train", epoch)) for *_, batch, _ in rank for index in batch]
        for epoch in (0, 1)
    ]
    assert [len(epoch) for epoch in epochs] == [60, 60]
    assert max(epochs[0] + epochs[1]) < 20
    assert sorted(epochs[0]) != sorted(epochs[1])


def test_ranks_that_see_the_same_samples_are_named_and_a_sampler_that_is_ignored_is_refused(tmp_path):
    trained = train(
        tmp_path,
        settings(epochs=1, limit_train_batches=3),
        "numerals.variants:Seen",
        "numerals.loaders:ForEachRank",
    )
    assert any(warning.reason.startswith("ranks 0, 1 see the same samples") for warning in trained.result.warnings)
    with pytest.raises(
        InputError, match=r"Ignored.train_dataloader must have .*RandomSampler\(replacement=True, num_s"
    ):
        train(tmp_path / "ignored", settings(), data="numerals.loaders:Ignored")
