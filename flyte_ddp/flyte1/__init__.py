"""Flyte 1 by flytekit: platform.py is its side of attempt/platform.py; beside it tasks, resources, caching, outputs.

Nothing here imports flyte, the SDK of Flyte 2, or flyte_ddp.flyte2.
"""
