"""An attempt at a task on any platform: its folder, data, checkpoints, logs, report and failures.

Nothing here imports flytekit or flyte. platform.py says what an attempt needs of either.
"""
