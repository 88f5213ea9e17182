"""Training by virtual ranks: a step whose result has the same bits on any number of ranks.

Nothing here knows an epoch, a schedule or an optimizer.
"""
