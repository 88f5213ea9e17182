"""One rank of a training: the loop and what it reads like. What that is made of has rooms of its own.

Imports torch, so no parent of ranks imports it, except job.py; knows no platform, report or built-in recipe.
"""
