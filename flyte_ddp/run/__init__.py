"""A command: `python -m flyte_ddp run RECIPE` trains on this machine, with an option for each setting.

It makes a call of train() from its arguments. What trains is not here.
"""
