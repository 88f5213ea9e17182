"""From a recipe's network to the one that trains: its first values, its place, what is compiled or computed again.

All of it happens once, before the first step.
"""
