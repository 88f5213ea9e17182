"""Step 6: the training of two_processes.py, with rank 1 killed after two epochs."""

import os
import signal

from torch import distributed

from digits import EPOCHS, network
from two_processes import train


def main() -> None:
    distributed.init_process_group("gloo")
    model = network()
    train(model, range(2))
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    train(model, range(2, EPOCHS))


if __name__ == "__main__":
    main()
