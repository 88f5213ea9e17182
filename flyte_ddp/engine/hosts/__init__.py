"""The hosts of a training, and what is odd about some of them, their GPUs and links, before the first step.

Nothing here changes the training, nor ends it unless options.odd_hosts says so.
"""
