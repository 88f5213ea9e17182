"""The steps from a recipe's network to the one that trains: first values, device, compiling, and memory.

All of them happen once, before the first step.
"""
