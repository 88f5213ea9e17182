"""The observers of events: console, page, figures, trackers.

They listen in the parent and change nothing; nothing here imports torch, and of the engine only job.py.
"""
