"""What tests of a JobSet's pods have in common."""

from flyte_ddp.recipes.hyperparameters import Hyperparameters

# One thread, as in a plain call, where a rank may have more
HP = Hyperparameters(epochs=4, batch_size=16, precision="float32", threads=1)
# Its processes end with it, also those that torchrun starts in sessions of their own; its name and hosts are its own
CONTAINER = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
MASTER = "job-workers-0-0.job.here.svc.cluster.local"
