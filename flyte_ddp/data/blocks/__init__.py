"""Data in blocks, which stay in their storage and are read while training goes on.

What writes them, indexes them and reads their rows is here; the order of an epoch over them is the engine's.
"""
