"""Flyte 1 by flytekit: platform.py implements attempt/platform.py; the rest has tasks, resources, caching and outputs.

Nothing here imports flyte, the SDK of Flyte 2, or flyte_ddp.flyte2.
"""
