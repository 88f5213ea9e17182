"""Recipes of test_ghost_batch_norm.py."""

from flyte_ddp.recipes.images import ImageClassifier


class ByGroups(ImageClassifier):
    norm_samples = 4


class ByGroupsInParts(ByGroups):
    micro_batch = 4
