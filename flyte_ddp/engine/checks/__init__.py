"""The trial before training: can a recipe be trained, saved, resumed and evaluated? See probe.py.

Nothing here changes the training: these checks refuse, or warn.
"""
