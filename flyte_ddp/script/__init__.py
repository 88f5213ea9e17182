"""A script that torchrun could run, run as it is: its ranks, its checkpoints in the storage, its figures.

Nothing here knows what the script computes.
"""
