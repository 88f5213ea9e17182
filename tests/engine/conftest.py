"""A process that is the only rank."""

import signal

import pytest
from torch import distributed


@pytest.fixture
def alone(monkeypatch):
    """This process as the only rank: what a launch has to do with is tested elsewhere."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any port that is free
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", **where}.items():
        monkeypatch.setenv(name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    if distributed.is_initialized():  # a rank that fails ends without parting from the others
        distributed.destroy_process_group()
    for number, handler in handlers.items():
        signal.signal(number, handler)
