"""The processes of ranks: this room starts them, listens to them, and says why one ended, hung or was lost.

It knows nothing of what the ranks do, and the parent's side imports no torch.
"""
