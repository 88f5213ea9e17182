"""Predictions of any recipe, shard by shard."""

import numpy as np
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import make_job, make_subject
from flyte_ddp.launch.launcher import run_alone
from tests.engine.dataset_recipes import OfDataset
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
