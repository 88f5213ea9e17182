"""The first import of the process that all ranks are forked from, and of no other. It imports torch, forks, and ends.

Looking for garbage during the imports and tidying up torch's modules at the end would take a quarter of its processor
time. A rank reverts both, in rank.py.
"""

import atexit
import gc
import os

gc.disable()
atexit.register(os._exit, 0)
