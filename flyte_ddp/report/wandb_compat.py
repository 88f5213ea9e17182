"""The private parts of wandb that this package uses, as of version 0.31.0; tests/compat tests them."""

from typing import Any


def kill_service() -> None:
    """Kill the process that W&B has started, if there is one. Values that the process has not sent are lost."""
    # wandb.teardown, which wandb also calls at the interpreter's exit, would wait until everything is sent
    from wandb.sdk import wandb_setup

    connection: Any = wandb_setup.singleton()._connection
    if connection and connection.owns_service:
        connection._cleanup()  # unregisters the call at the interpreter's exit
        connection._proc._process.kill()
