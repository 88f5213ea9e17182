"""Predictions of any recipe, shard by shard."""

import numpy as np
import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import make_job, make_subject
from flyte_ddp.engine.predict import run
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.launcher import ALONE, run_alone
from flyte_ddp.launch.link import Link
from tests.engine.dataset_recipes import OfDataset
from tests.engine.length_recipes import LENGTHS, HeldOut
from tests.engine.probe_recipes import SIZE, WIDTH, Settings


class Predicting(OfDataset):
    def predictions(self, outputs, batch):
        return outputs


def test_a_shard_without_a_sample_has_no_rows_of_the_same_width(tmp_path):
    torch.save(Predicting(Settings()).model().state_dict(), tmp_path / "model.pt")
    subject = make_subject(find_code(f"{__name__}:Predicting"), Settings())
    job = make_job(subject, model_path=tmp_path / "model.pt", logs=tmp_path)
    run_alone("flyte_ddp.engine.predict:run", (job, "test", 2 * SIZE - 1, 2 * SIZE), 60, lambda event: None)
    assert np.load(tmp_path / f"predictions-{2 * SIZE - 1}.npy").shape == (0, WIDTH)


class PredictingTheUsual(Predicting):
    """Leaves a sample out, but not in the first batch."""

    def predictions(self, outputs, batch):
        return outputs[outputs[:, 0] != outputs[-1, 0]] if len(outputs) < 8 else outputs


class PredictingShorter(Predicting):
    """Predicts rows that are shorter, but not in the first batch."""

    def predictions(self, outputs, batch):
        return outputs[:, : len(outputs)]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (PredictingTheUsual, r"a row for each of the 4 samples, got \(3, 8\)"),
        (PredictingShorter, r"the same shape for all batches, got \(4,\) and \(8,\)"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(tmp_path, recipe, words):
    torch.save(recipe(Settings()).model().state_dict(), tmp_path / "model.pt")
    settings = Settings(test_batch_size=8)
    job = make_job(
        make_subject(find_code(f"{__name__}:{recipe.__name__}"), settings),
        model_path=tmp_path / "model.pt",
        logs=tmp_path,
    )
    with pytest.raises(InputError, match=words):
        run(Environment(ALONE, 0, 0, "", threads=1), Link(), (job, "test", 0, 1))
    assert not [*tmp_path.glob("predictions-*")]


@pytest.mark.parametrize("split", ["validation", "tests"])
def test_a_split_that_the_recipe_does_not_have_is_refused(tmp_path, split):
    """The data() of many recipes returns the training samples for all but test."""
    torch.save(Predicting(Settings()).model().state_dict(), tmp_path / "model.pt")
    subject = make_subject(find_code(f"{__name__}:Predicting"), Settings(validation_fraction=0.25))
    job = make_job(subject, model_path=tmp_path / "model.pt", logs=tmp_path)
    with pytest.raises(InputError, match=f"split must be one of train, test, got '{split}'"):
        run(Environment(ALONE, 0, 0, "", threads=1), Link(), (job, split, 0, 1))


class PredictingItsShare(Predicting):
    def predictions(self, outputs, batch):
        share = self.share.first, self.share.count, self.share.size, len(self.all_gather(outputs))
        return torch.tensor([share] * len(outputs))


class PredictingTheLength(HeldOut):
    def predictions(self, outputs, batch):
        return torch.full((len(outputs), 1), outputs.shape[1])


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (PredictingItsShare, [[0, 8, 8, 8]] * 8 + [[0, 4, 4, 4]] * 4),
        (PredictingTheLength, [[max(LENGTHS[first : first + 8])] for first in (0, 8, 16, 24) for _ in range(8)][:30]),
    ],
)
def test_batches_are_those_of_an_evaluation_on_one_rank(tmp_path, recipe, expected):
    settings = Settings(test_batch_size=8)
    torch.save(recipe(settings).model().state_dict(), tmp_path / "model.pt")
    subject = make_subject(find_code(f"{__name__}:{recipe.__name__}"), settings)
    job = make_job(subject, model_path=tmp_path / "model.pt", logs=tmp_path)
    run(Environment(ALONE, 0, 0, "", threads=1), Link(), (job, "test", 0, 1))
    assert np.load(tmp_path / "predictions-0.npy").tolist() == expected
