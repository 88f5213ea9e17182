"""The private parts of wandb that this package uses, as of version 0.31.0: see tests/compat."""

from typing import Any


def kill_service() -> None:
    """Kills W&B's own process, if there is one, with everything that it has not sent.

    wandb.teardown waits until everything is sent, and wandb calls it when the interpreter exits; no public function
    gives up.
    """
    from wandb.sdk import wandb_setup

    connection: Any = wandb_setup.singleton()._connection
    if connection and connection.owns_service:
        connection._cleanup()  # unregisters that call
        connection._proc._process.kill()
