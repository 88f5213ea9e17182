"""Which code decides a result: versions of it, the user's own behind a recipe's name, and what has to be shipped.

Source is read here, never imported, and nothing here knows what a training is.
"""
