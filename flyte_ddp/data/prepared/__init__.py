"""Prepared datasets: the format of the folder, and what writes, verifies and opens it.

Where their images come from is not known here.
"""
