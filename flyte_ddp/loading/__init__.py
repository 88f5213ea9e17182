"""A feature: how many loader processes a rank's images are worth.

Only its entry file, workflows/image_folder.py, imports it.
"""
