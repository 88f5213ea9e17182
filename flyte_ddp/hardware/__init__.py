"""A feature: what the machine of a task has, and whether ranks can use it.

Only its entry file, workflows/hardware.py, imports it.
"""
