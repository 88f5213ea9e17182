"""A recipe of test_ghost_batch_norm.py."""

from flyte_ddp.recipes.images import ImageClassifier


class InParts(ImageClassifier):
    micro_batch = 4
