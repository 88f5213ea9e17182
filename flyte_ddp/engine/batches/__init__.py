"""The batches: which samples a batch has, in which order, and how a rank gets its share of them.

Nothing here knows a network, or what is done with a batch.
"""
