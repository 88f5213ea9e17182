"""The network of presets/cifar10-94.yaml, and the settings that only it uses."""

from pathlib import Path

import pytest
import torch
import yaml

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten
from flyte_ddp.recipe import Random
from flyte_ddp.recipes.airbench import Airbench94
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.recipes.images import ImageClassifier
from flyte_ddp.recipes.models import load_model
from tests.small_training import Unplugged, identical

PRESET = yaml.safe_load((Path(__file__).parents[2] / "presets" / "cifar10-94.yaml").read_text())
SETTINGS = {**PRESET, "epochs": 2, "batch_size": 159, "learning_rate": 0.02}


def recipe_for(data, **settings):
    return ImageClassifier(Hyperparameters(**settings), data)


def test_it_has_as_many_parameters_as_it_says():
    assert f"{sum(p.numel() for p in Airbench94((3, 32, 32), 10).parameters()):,}" in (Airbench94.__doc__ or "")


def test_the_first_layer_whitens_the_images_it_was_given():
    torch.manual_seed(1)
    smooth = torch.randn(20, 3, 16, 16).cumsum(3).cumsum(2) / 16
    network = Airbench94((3, 16, 16), 10)
    network.whiten(smooth)
    features = torch.nn.functional.conv2d(smooth, network.whitening.weight).transpose(0, 1).flatten(1)
    assert torch.equal(features[:12], -features[12:])
    moments = features[:12] @ features[:12].T / features.shape[1]
    assert (moments - moments.diag().diag()).abs().max() < 1e-3
    assert torch.all((moments.diag() > 0.5) & (moments.diag() < 1.01))


def test_a_file_of_weights_has_the_filters_that_depend_on_the_training_data(train, small_data):
    trained = train(2, **{**SETTINGS, "epochs": 1})
    first = recipe_for(small_data, **SETTINGS).initial_model().state_dict()
    found = load_model(trained.folder / "model.pt").state_dict()
    assert torch.equal(found["whitening.weight"], first["whitening.weight"])


def test_evaluation_is_the_same_for_an_image_and_its_mirror_image():
    network, images = Airbench94((3, 16, 16), 10), torch.randn(4, 3, 16, 16)
    assert not torch.allclose(network(images), network(images.flip(3)), rtol=1e-2)
    network.eval()
    assert torch.allclose(network(images), network(images.flip(3)))


def test_flips_alternate(small_data):
    recipe = recipe_for(small_data, flip=True, alternate_flips=True)
    images, labels = (tensor[:300] for tensor in recipe.data("train"))
    changed = []
    for epoch in range(4):
        augmented = recipe.augment((images, labels), Random(0, BatchShare(0, 300, 300), epoch=epoch))[0]
        mirrored = (augmented == images.flip(3)).flatten(1).all(1)
        assert torch.all(mirrored | (augmented == images).flatten(1).all(1))
        changed.append(mirrored)
    assert 75 < changed[0].sum() < 225
    assert torch.equal(changed[0], changed[2])
    assert torch.equal(changed[1], changed[3])
    assert torch.equal(changed[0], ~changed[1])


def test_alternate_flips_need_flips():
    with pytest.raises(InputError, match=r"Hyperparameters\.flip must be true where alternate_flips is, got false"):
        Hyperparameters(alternate_flips=True)


def test_biases_of_batch_norm_have_a_rate_of_their_own(small_data):
    recipe = recipe_for(small_data, model="airbench94", learning_rate=0.5, norm_bias_factor=8, weight_decay=0.16)
    others, biases = recipe.optimizer(recipe.model()).param_groups
    assert (others["lr"], others["weight_decay"]) == (0.5, 0.16)
    assert (biases["lr"], biases["weight_decay"]) == (4.0, 0.02)
    assert [len(bias) for bias in biases["params"]] == [64, 64, 256, 256, 256, 256]
    # a network without batch norm has nothing to tell apart
    plain = recipe_for(small_data, norm_bias_factor=8)
    assert len(plain.optimizer(plain.model()).param_groups) == 1


@pytest.mark.slow
def test_it_learns_resumes_and_is_the_same_on_one_rank_with_virtual_ranks(train):
    settings = {**SETTINGS, "virtual_ranks": 2}
    two = train(2, name="whole", **settings)

    def unplug(event):
        if isinstance(event, CheckpointWritten):
            raise Unplugged

    with pytest.raises(Unplugged):
        train(2, name="cut", **settings, checkpoint_seconds=0, on_event=unplug)
    resumed = train(1, name="cut", **settings)
    assert (resumed.events[0].first_epoch, resumed.events[0].first_step) > (0, 0)
    assert identical(resumed, two)
    assert two.result.epochs[1].train["loss"] < two.result.epochs[0].train["loss"]
