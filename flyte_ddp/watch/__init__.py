"""Commands that read what a training has written, and nothing else of it.

`python -m flyte_ddp watch LOGS` shows the progress of a training in the terminal. `compare RUN RUN` says whether two
trainings gave the same bits.
"""
