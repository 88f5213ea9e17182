"""The training processes' side, the only one that imports TensorFlow."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, EpochFinished
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from mirrored import checkpoint
from mirrored.data import Samples, breast_cancer
from mirrored.job import Job, Result
from mirrored.settings import Hyperparameters


def run(environment: Environment, link: Link, job: Job) -> Result:
    """Train as the only process of MirroredStrategy, or as a worker of MultiWorkerMirroredStrategy.

    Raises InputError if batch_size does not suit the replicas or the samples.
    """
    hp = job.hp
    train, test = breast_cancer("train"), breast_cancer("test")
    tf.config.threading.set_intra_op_parallelism_threads(environment.threads)
    tf.config.threading.set_inter_op_parallelism_threads(environment.threads)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * hp.logical_devices
    )
    strategy = join_workers(environment.rank, job.ports) if job.ports else mirror(hp.device_names)
    tf.keras.utils.set_random_seed(hp.seed)
    tf.config.experimental.enable_op_determinism()
    replicas = strategy.num_replicas_in_sync
    if not replicas <= hp.batch_size <= len(train.labels):
        raise InputError(
            f"batch_size must be at least the number of replicas ({replicas}) and at most that of training samples "
            f"({len(train.labels)}), got {hp.batch_size}"
        )
    with strategy.scope():
        model = build_network(hp, train.features)
    epochs = fit(strategy, model, train, test, job, environment.rank, link)
    if environment.rank == 0:
        model.save(job.model_path)
    confusion = tf.math.confusion_matrix(test.labels, np.argmax(model(test.features), axis=1))
    devices = [short_name(device) for device in strategy.extended.worker_devices]
    return Result(epochs, devices, replicas, confusion.numpy().tolist())


def mirror(wanted: list[str]) -> tf.distribute.Strategy:
    """Return MirroredStrategy over the wanted devices. Raises InputError, with the existing ones, if one is missing."""
    gpus, cpus = ([short_name(one.name) for one in tf.config.list_logical_devices(kind)] for kind in ("GPU", "CPU"))
    missing = [name for name in wanted if name not in gpus + cpus]
    if missing:
        raise InputError(
            f'devices must exist, got "{missing[0]}" where there are {", ".join(gpus + cpus)}; '
            f"logical_devices ({len(cpus)}) is the number of CPU devices"
        )
    return tf.distribute.MirroredStrategy(wanted or gpus or cpus)


def join_workers(rank: int, ports: list[int]) -> tf.distribute.Strategy:
    """Return MultiWorkerMirroredStrategy with a worker at each port of this host; each has its part of the GPUs."""
    gpus = tf.config.list_physical_devices("GPU")
    each = len(gpus) // len(ports)
    tf.config.set_visible_devices(gpus[rank * each : (rank + 1) * each], "GPU")
    addresses = [f"127.0.0.1:{port}" for port in ports]
    os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112 else gRPC asks the proxy of the environment
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def short_name(device: str) -> str:
    """Return CPU:0 for /job:localhost/replica:0/task:0/device:CPU:0."""
    return device.rpartition("device:")[2]


def build_network(hp: Hyperparameters, features: np.ndarray) -> tf.keras.Model:
    """Build the network, from features (N, 30) as measured to probabilities (N, 2).

    Its first layer normalises features by the mean and variance of the training samples.
    """
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((features.shape[1],)),
            layers.Normalization(mean=features.mean(axis=0), variance=features.var(axis=0)),
            layers.Dense(64, activation="relu"),
            layers.Dropout(hp.dropout),
            layers.Dense(32, activation="relu"),
            layers.Dropout(hp.dropout),
            layers.Dense(2, activation="softmax"),
        ]
    )


def fit(
    strategy: tf.distribute.Strategy,
    model: tf.keras.Model,
    train: Samples,
    test: Samples,
    job: Job,
    rank: int,
    link: Link,
) -> list[EpochFinished]:
    """Train for hp.epochs, in full batches only, and return what each epoch measured.

    Each epoch has its own order of the training samples, and ends with a checkpoint. Epochs that an earlier checkpoint
    has are not trained again.
    """
    hp = job.hp
    path = Path(job.checkpoint_path)
    with strategy.scope():
        adam = tf.keras.optimizers.Adam(hp.learning_rate)
        adam.build(model.trainable_variables)
    step = compile_step(strategy, model, adam, train, hp.batch_size)
    variables = [*model.variables, *adam.variables]  # including the state of the random number generators
    history = checkpoint.restore(path, variables)
    order = np.random.default_rng(hp.seed)
    steps = len(train.labels) // hp.batch_size
    for epoch in range(hp.epochs):
        batches = order.permutation(len(train.labels))[: steps * hp.batch_size].reshape(steps, hp.batch_size)
        if epoch < len(history):
            continue
        began = time.perf_counter()
        figures = []
        for batch in batches:
            figures.append([float(value) for value in step(tf.constant(batch))])
            link.heartbeat()
        loss, accuracy = np.mean(figures, axis=0).tolist()
        if not math.isfinite(loss):
            raise InputError(f"the loss is not finite in epoch {epoch + 1}: lower learning_rate ({hp.learning_rate:g})")
        trained = time.perf_counter()
        measures = {"loss": loss, "accuracy": accuracy}, evaluate(model, test)
        seconds = trained - began, time.perf_counter() - trained
        history.append(EpochFinished(epoch, batches.size, *measures, *seconds))
        link.emit(history[-1])
        if rank == 0:
            checkpoint.save(path, variables, history)
            link.emit(CheckpointWritten(epoch + 1, 0, str(path), stall_seconds=0.0, write_seconds=0.0))
    return history


def compile_step(
    strategy: tf.distribute.Strategy, model: tf.keras.Model, adam: Any, train: Samples, size: int
) -> Callable:
    """Return a function that updates the weights on all replicas, by a batch of indices of training samples.

    It returns the mean loss and accuracy of the batch.

    Our own, because Keras 3's fit() does not support MultiWorkerMirroredStrategy. Every replica gets the whole batch
    and takes its part, so that batches and gradients are the same for any number of replicas.
    """
    features, labels = tf.constant(train.features), tf.constant(train.labels)

    def replica_step(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mine = batch[tf.distribute.get_replica_context().replica_id_in_sync_group :: strategy.num_replicas_in_sync]
        wanted = tf.gather(labels, mine)
        with tf.GradientTape() as tape:
            probabilities = model(tf.gather(features, mine), training=True)
            loss = tf.reduce_sum(tf.keras.losses.sparse_categorical_crossentropy(wanted, probabilities)) / size
        gradients = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # adds up those of all replicas
        right = tf.cast(tf.argmax(probabilities, axis=1) == wanted, tf.float32)
        return loss, tf.reduce_sum(right) / size

    @tf.function
    def step(batch: tf.Tensor) -> list[tf.Tensor]:
        return [strategy.reduce("SUM", value, axis=None) for value in strategy.run(replica_step, args=(batch,))]

    return step


def evaluate(model: tf.keras.Model, test: Samples) -> dict[str, float]:
    """Return loss and accuracy on the test split. Each process computes all of it: 113 samples need no sharing out."""
    probabilities = model(test.features)
    losses = tf.keras.losses.sparse_categorical_crossentropy(test.labels, probabilities)
    right = np.argmax(probabilities, axis=1) == test.labels
    return {"loss": float(np.mean(losses)), "accuracy": float(np.mean(right))}
