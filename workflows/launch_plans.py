"""Launch plans, to be started from Flyte's console or by name; none of them is active when registered."""

from flytekit import CronSchedule, LaunchPlan

from flyte_ddp.attempt.registration import registration
from flyte_ddp.flyte1.resources import execution_options
from flyte_ddp.recipes.hyperparameters import CIFAR10Hyperparameters, FashionMNISTHyperparameters, Hyperparameters
from workflows.cifar10 import cifar10_wf
from workflows.fashion_mnist import fashion_mnist_wf
from workflows.mnist import pytorch_training_wf
from workflows.promote import promote_wf

mnist = LaunchPlan.get_or_create(
    pytorch_training_wf, "mnist", {"hp": Hyperparameters(dataset="mnist")}, **execution_options()
)

fashion_mnist = LaunchPlan.get_or_create(
    fashion_mnist_wf,
    "fashion_mnist",
    {"hp": FashionMNISTHyperparameters(dataset="fashion_mnist")},
    **execution_options(),
)

cifar10 = LaunchPlan.get_or_create(
    cifar10_wf, "cifar10", {"hp": CIFAR10Hyperparameters(dataset="cifar10")}, **execution_options()
)

# Takes seconds, with data from the image: shows whether a cluster can run a training at all
digits_smoke = LaunchPlan.get_or_create(
    pytorch_training_wf,
    "digits_smoke",
    {"hp": Hyperparameters(dataset="digits", epochs=5)},
    **execution_options(),
)

# Flyte runs it from when it is activated: flytectl update launchplan nightly --version VERSION --activate
# Where DDP_PROMOTE_TO was set when registering, the model is promoted there if it is better than the one before
nightly = LaunchPlan.get_or_create(
    promote_wf if registration().promote_to else pytorch_training_wf,
    "nightly",
    {"hp": Hyperparameters(dataset="mnist")},
    schedule=CronSchedule(schedule="0 3 * * *"),  # UTC
    **execution_options(),
    overwrite_cache=True,
)
