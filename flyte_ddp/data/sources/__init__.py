"""What prepared datasets are made from: datasets known by name, folders of images, downloads.

Ranks read what has been prepared, and never import this.
"""
