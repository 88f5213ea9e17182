"""What makes a network's random numbers and statistics those of the global batch, on any number of ranks.

Nothing here knows a step, a loss or an optimizer.
"""
