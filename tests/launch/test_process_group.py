import gc
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.phases import Timeouts
from flyte_ddp.launch.process_group import meet
from tests.commands import free_port


def test_rank_0_serves_the_store_of_the_next_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun's agent, rank 1 may reach the second training while rank 0 still ends the first."""
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    environment = Environment(World(size=2, local_size=2, backend="gloo", device="cpu"), 0, 0, "env://", threads=1)

    def meet_rank_1() -> TCPStore:
        return TCPStore("127.0.0.1", port, world_size=2, timeout=timedelta(seconds=10))

    with ThreadPoolExecutor() as threads:
        rank_1 = threads.submit(meet_rank_1)
        store = meet(environment, Timeouts.of(10.0))
        rank_1.result()
    del store
    gc.collect()
    meet_rank_1().set("address", "of rank 1")
    assert meet(environment, Timeouts.of(10.0)).num_keys() > 0
