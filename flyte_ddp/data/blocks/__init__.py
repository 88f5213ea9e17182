"""Data in blocks, which stay in their storage and are read while training goes on.

This room writes blocks, indexes them and reads their rows. The order of an epoch over them is the engine's.
"""
