"""A feature: a trained network as programs of ONNX and torch.export, each verified against the network.

Only its entry files import it.
"""
