"""A recipe of which another type of numbers stays behind."""

import torch

from flyte_ddp.recipes.images import ImageClassifier


class LeavesHalf(ImageClassifier):
    """As to build parts of a network in bfloat16, and never set back."""

    def model(self):
        network = super().model()
        torch.set_default_dtype(torch.bfloat16)
        return network
