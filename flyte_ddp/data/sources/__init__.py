"""The sources of prepared datasets: datasets known by name, folders of images, and downloads.

Ranks read what has been prepared, and never import this room.
"""
