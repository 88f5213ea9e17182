"""The trial before training, which finds out whether a recipe can be trained, saved, resumed and evaluated.

probe.py lists the checks. They refuse or warn, and never change the training.
"""
