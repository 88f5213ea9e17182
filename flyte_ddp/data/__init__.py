"""The samples to train on, before any rank has cut them into batches.

Nothing here knows an engine or a platform. Each room imports only from those below it: sources, prepared, then the
files of this folder; blocks only from the latter.
"""
