"""The private parts of wandb that this package uses, as of version 0.31.0; tests/compat tests them."""

from typing import Any


def kill_service() -> None:
    """Kill W&B's own process, if there is one, with everything that it has not sent.

    wandb.teardown waits until everything is sent, and wandb calls it when the interpreter exits. No public function
    gives up.
    """
    from wandb.sdk import wandb_setup

    connection: Any = wandb_setup.singleton()._connection
    if connection and connection.owns_service:
        connection._cleanup()  # unregisters the call at the interpreter's exit
        connection._proc._process.kill()
