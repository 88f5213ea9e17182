"""Prepared datasets: the format of the folder, and the functions that write, verify and open it.

Nothing here knows where the images come from.
"""
