"""LightningModules in our ranks: its Trainer in place of the engine, with the same events and checkpoint files.

Only here is lightning imported.
"""
