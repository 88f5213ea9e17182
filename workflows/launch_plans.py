"""Ready-made runs, to be started from Flyte's console or by name; none of them is active when registered."""

from flytekit import CronSchedule, LaunchPlan

from workflows.mnist import pytorch_training_wf
from workflows.training.hyperparameters import Hyperparameters

mnist = LaunchPlan.get_or_create(pytorch_training_wf, "mnist", {"hp": Hyperparameters(dataset="mnist")})

fashion_mnist = LaunchPlan.get_or_create(
    pytorch_training_wf, "fashion_mnist", {"hp": Hyperparameters(dataset="fashion_mnist", epochs=10)}
)

# Seconds long, and the data are in the image: shows that a cluster can run it at all
digits_smoke = LaunchPlan.get_or_create(
    pytorch_training_wf, "digits_smoke", {"hp": Hyperparameters(dataset="digits", epochs=5)}
)

# Flyte runs it from when it is activated: flytectl update launchplan nightly --version VERSION --activate
nightly = LaunchPlan.get_or_create(
    pytorch_training_wf,
    "nightly",
    {"hp": Hyperparameters(dataset="mnist")},
    schedule=CronSchedule(schedule="0 3 * * *"),  # UTC
    overwrite_cache=True,
)
