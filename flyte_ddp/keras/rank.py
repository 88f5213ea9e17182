"""A Keras network for tabular data, trained under tf.distribute; only the training processes import TensorFlow."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Tuple

import numpy as np

from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochFinished
from flyte_ddp.keras.checkpoint import restore, save
from flyte_ddp.keras.job import CLASSES, MirroredHyperparameters, MirroredJob, MirroredResult
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.storage import writing_to

MEASURES = ("loss", "accuracy")


class Samples(NamedTuple):
    """A split: features (N, 30) float32 as measured, labels (N,) int64, indices into CLASSES."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


def run(environment: Environment, link: Link, job: MirroredJob) -> MirroredResult:
    """One process of a training: the only one of MirroredStrategy, or a worker of MultiWorkerMirroredStrategy."""
    hp, tf = job.hp, import_tensorflow()
    tf.config.threading.set_intra_op_parallelism_threads(environment.threads)
    tf.config.threading.set_inter_op_parallelism_threads(environment.threads)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * hp.logical_devices
    )
    strategy = join_workers(tf, environment.rank, job.ports) if job.ports else mirror(tf, hp.device_names)
    tf.keras.utils.set_random_seed(hp.seed)
    tf.config.experimental.enable_op_determinism()
    samples = breast_cancer()
    check_batch_size(hp.batch_size, strategy.num_replicas_in_sync, len(samples.train))
    with strategy.scope():
        model = build_network(tf, hp, samples.train)
    history = fit(tf, strategy, model, samples, job, environment.rank, link)
    predicted = np.argmax(model(samples.test, training=False), axis=1)
    if environment.rank == 0:
        with writing_to(Path(job.model_path).parent, "DDP_RUNS_DIR"):
            model.save(job.model_path)
    return MirroredResult(
        epochs=history,
        devices=[short_name(device) for device in strategy.extended.worker_devices],
        replicas=strategy.num_replicas_in_sync,
        train_samples=len(samples.train),
        test_samples=len(samples.test),
        confusion=[
            [int(np.sum((samples.test_labels == actual) & (predicted == said))) for said in range(2)]
            for actual in range(2)
        ],
        layers=[(layer.name, type(layer).__name__, layer.count_params()) for layer in model.layers],
    )


def import_tensorflow() -> Any:
    """The module, imported without its native code's messages about CPU and CUDA, which no log level suppresses."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    standard_error = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        import tensorflow
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
    return tensorflow


def mirror(tf: Any, wished: List[str]) -> Any:
    """MirroredStrategy over the given devices; InputError listing the existing ones if one does not exist."""
    gpus, cpus = ([short_name(one.name) for one in tf.config.list_logical_devices(kind)] for kind in ("GPU", "CPU"))
    missing = [name for name in wished if name not in gpus + cpus]
    if missing:
        raise InputError(
            f'devices: there is no "{missing[0]}" here, but {", ".join(gpus + cpus)}; '
            f"logical_devices ({len(cpus)}) is the number of CPU devices"
        )
    return tf.distribute.MirroredStrategy(wished or gpus or cpus)


def short_name(device: str) -> str:
    """CPU:0 of /job:localhost/replica:0/task:0/device:CPU:0."""
    return device.rpartition("device:")[2]


def join_workers(tf: Any, rank: int, ports: List[int]) -> Any:
    """MultiWorkerMirroredStrategy with a worker at each port of this host; each has its share of the GPUs."""
    gpus = tf.config.list_physical_devices("GPU")
    share = len(gpus) // len(ports)
    tf.config.set_visible_devices(gpus[rank * share : (rank + 1) * share], "GPU")
    addresses = [f"127.0.0.1:{port}" for port in ports]
    os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112 else gRPC asks the proxy of the environment
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def check_batch_size(batch_size: int, replicas: int, samples: int) -> None:
    if not replicas <= batch_size <= samples:
        raise InputError(
            f"batch_size must be at least the number of replicas ({replicas}) and at most that of training samples "
            f"({samples}), got {batch_size}"
        )


def breast_cancer() -> Samples:
    """The 569 samples that come with scikit-learn (UCI, Wisconsin, diagnostic): 456 to train on, 113 to test on."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    features, labels = features.astype(np.float32), labels.astype(np.int64)
    within_class = np.where(labels == 1, np.cumsum(labels == 1), np.cumsum(labels == 0)) - 1
    test = within_class % 5 == 4  # every fifth of each class: a random generator's numbers could change
    return Samples(features[~test], labels[~test], features[test], labels[test])


def build_network(tf: Any, hp: MirroredHyperparameters, train: np.ndarray) -> Any:
    """Features (N, 30) as measured to probabilities (N, 2); normalises by the training samples' mean and variance."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((train.shape[1],)),
            layers.Normalization(mean=train.mean(axis=0), variance=train.var(axis=0)),
            layers.Dense(hp.first_hidden, activation="relu"),
            layers.Dropout(hp.dropout),
            layers.Dense(hp.second_hidden, activation="relu"),
            layers.Dropout(hp.dropout),
            layers.Dense(len(CLASSES), activation="softmax"),
        ]
    )


def fit(
    tf: Any, strategy: Any, model: Any, samples: Samples, job: MirroredJob, rank: int, link: Link
) -> List[EpochFinished]:
    """Trains for hp.epochs, each with its own order of the training samples, in full batches only.

    Each epoch ends with a checkpoint; training resumes from one that exists at the start.
    """
    hp = job.hp
    with strategy.scope():
        adam = tf.keras.optimizers.Adam(hp.learning_rate)
        adam.build(model.trainable_variables)
    step = compile_step(tf, strategy, model, adam, samples, hp)
    variables = [*model.variables, *adam.variables]  # including the state of the random number generators
    history = restore(Path(job.checkpoint_path), job.key, variables, link) if job.checkpoint_path else []
    if history and rank == 0:
        print(f"resuming from the checkpoint: epoch {len(history) + 1}")
    order, steps = np.random.default_rng(hp.seed), len(samples.train) // hp.batch_size
    for epoch in range(hp.epochs):
        began = time.perf_counter()
        batches = order.permutation(len(samples.train))[: steps * hp.batch_size].reshape(steps, hp.batch_size)
        if epoch < len(history):
            continue
        figures = []
        for batch in batches:
            figures.append([float(value) for value in step(tf.constant(batch))])
            link.alive()
        measures = dict(zip(MEASURES, np.mean(figures, axis=0).tolist(), strict=True))
        if not math.isfinite(measures["loss"]):
            raise InputError(f"the loss is not finite in epoch {epoch + 1}: lower learning_rate ({hp.learning_rate:g})")
        trained = time.perf_counter()
        test = dict(zip(MEASURES, evaluate(model, samples), strict=True))
        seconds = (trained - began, time.perf_counter() - trained)
        history.append(EpochFinished(epoch, batches.size, measures, test, *seconds))
        link.emit(history[-1])
        if rank == 0 and job.checkpoint_path:
            save(Path(job.checkpoint_path), job.key, variables, history, link)
    return history


def compile_step(
    tf: Any, strategy: Any, model: Any, adam: Any, samples: Samples, hp: MirroredHyperparameters
) -> Callable:
    """One update of the weights on all replicas: from indices of training samples to mean loss and accuracy.

    Our own, because Keras 3's fit() does not support MultiWorkerMirroredStrategy. Every replica gets the whole batch
    and takes its part, so that batches and gradients are the same for any number of replicas.
    """
    features, labels = tf.constant(samples.train), tf.constant(samples.train_labels)

    def replica_step(batch: Any) -> Tuple[Any, Any]:
        mine = batch[tf.distribute.get_replica_context().replica_id_in_sync_group :: strategy.num_replicas_in_sync]
        wanted = tf.gather(labels, mine)
        with tf.GradientTape() as tape:
            probabilities = model(tf.gather(features, mine), training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(wanted, probabilities)
            loss = tf.reduce_sum(losses) / hp.batch_size
        gradients = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # adds up those of all replicas
        right = tf.cast(tf.argmax(probabilities, axis=1) == wanted, tf.float32)
        return loss, tf.reduce_sum(right) / hp.batch_size

    @tf.function
    def step(batch: Any) -> List[Any]:
        return [strategy.reduce("SUM", value, axis=None) for value in strategy.run(replica_step, args=(batch,))]

    return step


def evaluate(model: Any, samples: Samples) -> Tuple[float, float]:
    """Mean loss and accuracy on the test samples, computed in every process: 113 samples are not worth sharing out."""
    probabilities = np.asarray(model(samples.test, training=False))
    of_label = probabilities[np.arange(len(probabilities)), samples.test_labels]
    accuracy = np.mean(np.argmax(probabilities, axis=1) == samples.test_labels)
    return float(-np.mean(np.log(np.maximum(of_label, 1e-7)))), float(accuracy)
