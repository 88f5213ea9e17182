"""A rank of a training: the loop, and the modules that it calls. Their parts have rooms of their own.

Imports torch, so no parent of ranks imports it, except job.py; knows no platform, report or built-in recipe.
"""
