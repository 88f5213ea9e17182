"""A feature: the predictions of a trained classifier for a dataset, shard by shard.

Only its entry files import it.
"""
