"""A training loop of the user's own: what it is given, and what happens around it.

Steps, optimizer and network are the user's; order, checkpoints, events and digests are the engine's, as for a recipe.
Nothing here knows recipes.
"""
