"""The private parts of wandb that this package touches, read from version 0.31.0: see tests/test_compat.py."""

from typing import Any


def kill_service() -> None:
    """Ends W&B's own process, where there is one, with all that it has not sent.

    wandb.teardown waits until all is sent, and wandb calls it when the interpreter ends; nothing public gives up.
    """
    from wandb.sdk import wandb_setup

    connection: Any = wandb_setup.singleton()._connection
    if connection and connection.owns_service:
        connection._cleanup()  # takes that call back
        connection._proc._process.kill()
