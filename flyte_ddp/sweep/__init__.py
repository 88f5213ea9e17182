"""A feature: trials of several settings side by side, and which of them is the best.

Only its entry files import it.
"""
