"""The built-in recipes: image classifiers, their networks and hyperparameters.

Nothing of the engine imports them; hyperparameters.py does without torch, for the parent.
"""
