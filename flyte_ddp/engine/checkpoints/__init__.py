"""The state of a training in files: written while it goes on, verified, and read again by the same or other ranks.

state.py decides what the state consists of, not this room.
"""
