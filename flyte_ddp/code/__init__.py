"""Code that decides a result: its version, the user's code behind a recipe's name, and what has to be shipped.

Source is read here, never imported, and nothing here knows what a training is.
"""
