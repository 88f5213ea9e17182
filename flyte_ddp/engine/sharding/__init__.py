"""Networks whose weights the ranks divide among themselves, and their state in whole tensors.

Networks that are not sharded pass through as they are, so callers need not ask.
"""
