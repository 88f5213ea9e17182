"""Processes: starts ranks, hears of them, and tells why one ended, hung or was lost.

Knows nothing of what the ranks do, and the side of the parent imports no torch.
"""
