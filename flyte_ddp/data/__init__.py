"""The samples to train on, before any rank has cut them into batches.

Nothing here knows an engine or a platform. The rooms are, from the top: sources, prepared, the files of this folder.
Each imports only from those below it; blocks imports only from the files of this folder.
"""
