"""The state of a training in files: written while it goes on, verified, read again by the same or by other ranks.

What the state consists of is not decided here, but in state.py.
"""
