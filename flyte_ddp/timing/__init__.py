"""A feature: how long a trained network takes for a batch.

Only its entry file, workflows/inference.py, imports it.
"""
