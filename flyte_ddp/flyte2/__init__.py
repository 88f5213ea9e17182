"""Flyte 2 by its SDK: platform.py is its side of attempt/platform.py; beside it environments, caching, outputs.

Nothing here imports flytekit or flyte_ddp.flyte1.
"""
