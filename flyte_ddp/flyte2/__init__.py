"""Flyte 2 by its SDK: platform.py implements attempt/platform.py; the rest has environments, caching and outputs.

Nothing here imports flytekit or flyte_ddp.flyte1.
"""
