"""A feature: trials of several settings side by side, and the best of them.

Only its entry files import it.
"""
