"""The observers of events: console, page, figures and trackers.

Observers listen in the parent and change nothing. Nothing here imports torch, and of the engine only job.py.
"""
