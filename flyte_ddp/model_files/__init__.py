"""A model's weights in files: how they are written, read and described, and what they leave out.

Nothing here knows a training. model_metadata.py and pretrained.py do without torch.
"""
