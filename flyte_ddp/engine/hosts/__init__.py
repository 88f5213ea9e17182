"""On what a training runs, and what is odd about some of its hosts, GPUs and links, before its first step.

Nothing here changes the training, nor ends it unless options.odd_hosts says so.
"""
