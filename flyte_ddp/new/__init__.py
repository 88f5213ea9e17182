"""The command `python -m flyte_ddp new NAME`, which writes a project from the template beside it.

The templates are data, which nothing here imports.
"""
