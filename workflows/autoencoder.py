"""An autoencoder as a LightningModule, trained under Lightning's Trainer by one spawned process per GPU (or CPU rank).

pyflyte run workflows/autoencoder.py autoencoder_wf --hp '{"epochs": 3}'
"""

from flytekit import Cache, dynamic, task, workflow

from flyte_ddp.attempt.registration import registration
from flyte_ddp.autoencoder.settings import AutoencoderHyperparameters
from flyte_ddp.autoencoder.task import AutoencoderOutputs, autoencoder, resolve_for_autoencoder
from flyte_ddp.code.code_version import code_version
from flyte_ddp.flyte1.caching import CodeVersion, OnClustersOnly
from flyte_ddp.flyte1.prepare import RESOLVING, PreparedDataset, prepare_dataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.resources import dynamic_resources, resize
from flyte_ddp.lightning.settings import LightningOptions

set_up_pyflyte()

OWN_CODE = CodeVersion(code_version("workflows.autoencoder"), ())


@task(**autoencoder.arguments())
def autoencoder_task(
    hp: AutoencoderHyperparameters, data: PreparedDataset, options: LightningOptions
) -> AutoencoderOutputs:
    """Trains on the prepared dataset, with options.nproc ranks."""
    return autoencoder.run(hp, options, data)


@dynamic(
    task_config=OnClustersOnly(),
    cache=Cache(policies=[autoencoder.version, RESOLVING, OWN_CODE], ignored_inputs=("gpus", "options")),
    **dynamic_resources(),
)
def train_on_gpus(gpus: int, hp: AutoencoderHyperparameters, options: LightningOptions) -> AutoencoderOutputs:
    """Prepares the data and trains, in a pod with this many GPUs."""
    sizes = resize(autoencoder_task, gpus)
    data = prepare_dataset(name=resolve_for_autoencoder(hp=hp, options=options))
    return autoencoder_task(hp=hp, data=data, options=options).with_overrides(**sizes)


@workflow
def autoencoder_wf(
    gpus: int = registration().training_gpus,
    hp: AutoencoderHyperparameters = AutoencoderHyperparameters(),
    options: LightningOptions = LightningOptions(),
) -> AutoencoderOutputs:
    """Trains an autoencoder on the dataset that hp names.

    Args:
        gpus: of the training's pod, 0 for none; the default is the registration's. Ignored in a local run.
        hp: what determines the result; omitted fields keep their defaults.
        options: how to run it; ignored by the cache.
    """
    return train_on_gpus(gpus=gpus, hp=hp, options=options)


if __name__ == "__main__":
    print(autoencoder_wf())
