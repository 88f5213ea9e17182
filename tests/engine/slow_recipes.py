"""Recipes that take their time, or never end, where something large would be loaded or written."""

import threading
from dataclasses import dataclass

from torch import distributed

from flyte_ddp.fields import setting
from tests.engine import probe_recipes
from tests.engine.probe_recipes import Sound


@dataclass(frozen=True)
class Settings(probe_recipes.Settings):
    """Seconds that a rank waits in each method; below 0 for ever."""

    in_data: float = setting(0.0)
    in_model: float = setting(0.0)
    in_pictures: float = setting(0.0)


class Slow(Sound):
    """Rank 1 loads its data and its network slowly, and rank 0 draws its pictures slowly, once they have been tried."""

    is_tried = False

    def data(self, split):
        self.wait("in_data", 1)
        return super().data(split)

    def model(self):
        self.wait("in_model", 1)
        return super().model()

    def pictures(self, outputs, batch):
        if self.is_tried:
            self.wait("in_pictures", 0)
        self.is_tried = True
        return ()

    def wait(self, where, rank):
        seconds = getattr(self.settings, where)
        if distributed.get_rank() == rank and seconds:
            threading.Event().wait(seconds if seconds > 0 else None)
