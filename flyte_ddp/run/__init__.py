"""The command `python -m flyte_ddp run RECIPE`, which trains on this machine, with an option for each setting.

The command turns its arguments into a call of train(); no training code belongs here.
"""
