"""What is tried before training: does the result depend on how many ranks share a batch, or on what nobody keeps?

Nothing here changes the training; what it finds, it refuses or tells.
"""
