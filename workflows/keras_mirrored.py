"""A Keras network under tf.distribute: one process with a replica per device, or two workers that meet on loopback.

pyflyte run workflows/keras_mirrored.py keras_mirrored_wf --hp '{"strategy": "multi_worker"}'
"""

from flytekit import task, workflow

from flyte_ddp.keras.job import MirroredHyperparameters
from flyte_ddp.keras.task import MirroredOutputs, train_mirrored
from flyte_ddp.report.console import say
from flyte_ddp.tasks.pyflyte import set_up_pyflyte
from flyte_ddp.tasks.resources import KERAS_IMAGE, is_named, training_resources

set_up_pyflyte()

if is_named("keras"):
    # Not cached: the cache key would need TensorFlow's version, and it need not be installed where tasks are registered
    @task(retries=2, enable_deck=True, deck_fields=(), **{**training_resources(), "container_image": KERAS_IMAGE})
    def keras_mirrored_task(hp: MirroredHyperparameters) -> MirroredOutputs:
        """Trains in a pod with an image of its own: TensorFlow is as large as everything else together."""
        return train_mirrored(hp)

    @workflow
    def keras_mirrored_wf(hp: MirroredHyperparameters = MirroredHyperparameters()) -> MirroredOutputs:
        """Trains a Keras network with two hidden layers on several devices.

        Args:
            hp: the network, its training and its devices, in part or whole; the rest takes its defaults.
        """
        return keras_mirrored_task(hp=hp)

else:
    say("workflows/keras_mirrored.py is not registered: no image is named for it (--image keras=NAME)")


if __name__ == "__main__":
    print(keras_mirrored_wf())
