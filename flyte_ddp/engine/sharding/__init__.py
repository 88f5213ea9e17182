"""Networks whose weights are shared out over the ranks, and their state in whole tensors.

Whatever is not sharded passes through it as it is, so callers need not ask.
"""
