"""Commands: `python -m flyte_ddp watch LOGS` shows the progress of a training in the terminal, `compare RUN RUN`
whether two gave the same bits.

Reads what a training has written, and nothing else of it.
"""
