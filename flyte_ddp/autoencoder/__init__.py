"""A feature: a training without labels, with a report of its own.

No other package imports it; its entry file is workflows/autoencoder.py.
"""
