"""The observation of a training while it runs: where time goes, whether it learns, which weights are the best so far.

Nothing here changes a weight, and whatever it finds is only reported.
"""
