"""A command: `python -m flyte_ddp watch LOGS` shows the progress of a training in the terminal.

Reads what a training has written, and nothing else of it.
"""
