"""The built-in recipes: image classifiers, their networks and hyperparameters.

The engine imports none of them. hyperparameters.py does without torch, for the parent.
"""
