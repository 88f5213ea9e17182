"""A feature: the best of several trainings gets a place where others find it.

Only its entry files import it.
"""
