"""Trainings on blocks: the same for any ranks and after any kill, with few blocks on the disk."""

import itertools
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.code.user_code import find_code
from flyte_ddp.data.blocks.block_folder import write_blocks
from flyte_ddp.data.blocks.blocks import Blocks, open_rows
from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.events import RunStarted, StepLogged
from flyte_ddp.flyte1 import platform as flytekit_platform
from flyte_ddp.flyte1.data import stream
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.block_recipes import Settings, fetched, note_of
from tests.object_storage import object_storage
from tests.small_training import Unplugged

RECIPES = "tests.engine.block_recipes"
ROWS, SAMPLES = 10, 604  # 61 blocks, the last one short; 26 steps of 24, the last one short
BLOCK = 64 * 4 * ROWS + 8 * ROWS + 4096  # bytes, as they are reckoned with


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Digits sorted by class, in blocks of ten."""
    folder = tmp_path_factory.mktemp("digits") / "data"
    for split, count in (("train", SAMPLES), ("test", 95)):
        images, labels = (part[:count] for part in open_split(prepare("digits"), split))
        order = np.argsort(labels, kind="stable")
        rows = images.reshape(count, -1)[order, :: images[0].size // 64][:, :64].astype(np.float32) / 16
        write_blocks(folder / split, {"image": rows, "label": labels[order]}, ROWS)
    return folder


def run(digits, output, nproc=1, recipe="Digits", on_event=None, cache_bytes=0, seconds=1e9, **settings):
    options = RunOptions(nproc=nproc, tracking="off", checkpoint_seconds=seconds, cache_bytes=cache_bytes)
    events = []

    def listen(event):
        events.append(event)
        if on_event:
            on_event(event)

    found = train(f"{RECIPES}:{recipe}", Settings(**settings), options, digits, output, on_event=listen)
    return found, torch.load(found.model_path, weights_only=True), events


def gap(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
def test_ranks_do_not_change_the_result(digits, tmp_path):
    first, weights, _ = run(digits, tmp_path / "first", virtual_ranks=3)
    labels = np.load(tmp_path / "first" / "predictions.npy")
    assert labels.tolist() == sorted(labels.tolist())  # in the order of the data, whatever that of the batches
    other, others, _ = run(digits, tmp_path / "other", 2, virtual_ranks=3)
    assert gap(weights, others) == 0
    assert other.epochs[1].evaluated == first.epochs[1].evaluated
    assert np.array_equal(np.load(tmp_path / "other" / "predictions.npy"), labels)
    assert gap(weights, run(digits, tmp_path / "seed", seed=2)[1]) > 1e-3
    assert not list(Path(tempfile.gettempdir(), "ddp-blocks").glob("*-*"))


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bits(digits, tmp_path):
    kills, epochs = 4, 3
    _, expected, _ = run(digits, tmp_path / "whole", 2, epochs=epochs)
    draw, first_steps = random.Random(1), []
    for number in itertools.count():
        stop = draw.randrange(1, 12) if number < kills else 0
        steps = itertools.count(1)

        def unplug(event, steps=steps, stop=stop):
            if isinstance(event, RunStarted):
                first_steps.append(26 * event.first_epoch + event.first_step)
            if isinstance(event, StepLogged) and next(steps) == stop:
                raise Unplugged

        try:
            _, weights, _ = run(digits, tmp_path / "killed", 2, on_event=unplug, seconds=0, epochs=epochs)
            break
        except Unplugged:
            pass
    assert number == kills
    assert len(set(first_steps)) > 2
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_resuming_in_the_middle_of_an_epoch_fetches_only_what_is_still_needed(digits, tmp_path):
    def unplug(event):
        if isinstance(event, StepLogged) and (event.epoch, event.step) == (1, 20):
            raise Unplugged

    with pytest.raises(Unplugged):
        run(digits, tmp_path / "killed", on_event=unplug, seconds=0)
    note_of(digits / "train").unlink()
    run(digits, tmp_path / "killed")
    assert len(set(fetched(digits / "train")["0"])) < 30


def test_evaluations_within_an_epoch_fetch_only_the_blocks_at_hand_again(digits, tmp_path):
    _, expected, _ = run(digits, tmp_path / "once", 2, epochs=1)
    note_of(digits / "train").unlink()
    found, weights, _ = run(digits, tmp_path / "thrice", 2, epochs=1, evaluations_per_epoch=3)
    assert [epoch.samples for epoch in found.epochs] == [8 * 24, 9 * 24, 604 - 17 * 24]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    at_hand = 6 * (20 // ROWS + 2)  # streams, and what a window of each takes
    assert len(fetched(digits / "train")["0"]) <= 61 + 2 * at_hand


@pytest.mark.parametrize(("nproc", "batch_size"), [(2, 24), (4, 26)])
def test_each_node_reads_its_own_part_of_the_data(digits, tmp_path, nproc, batch_size):
    """Also where ranks share streams, and a batch does not divide by them."""
    note_of(digits / "train").unlink(missing_ok=True)
    settings = Settings(epochs=1, batch_size=batch_size, streams=13)
    subject = make_subject(find_code(f"{RECIPES}:Digits"), settings, digits)
    job = job_in(tmp_path, subject, RunOptions())
    world = choose_world("gloo", nproc, batch_size)
    launcher.launch(f"{RECIPES}:train_on_two_nodes", world, job, 120, lambda event: None)
    for blocks in fetched(digits / "train").values():
        assert len(blocks) - 4 <= 0.6 * 61  # four are looked at before the training
        assert len(blocks) - len(set(blocks)) <= 4


def test_a_cache_of_two_blocks_is_enough_for_one_stream(digits, tmp_path):
    one = {"streams": 1, "window": 5, "batch_size": 5, "test_batch_size": 5, "epochs": 1, "virtual_ranks": 2}
    most = []

    def measure(event):
        if isinstance(event, StepLogged):
            root = Path(tempfile.gettempdir(), "ddp-blocks")
            most.append(len(list(root.glob("*/*/train-*.npy"))))

    _, weights, _ = run(digits, tmp_path / "small", cache_bytes=2 * BLOCK, **one, on_event=measure)
    assert 1 <= max(most) <= 2
    _, others, _ = run(digits, tmp_path / "large", 2, **one)
    assert gap(weights, others) == 0


def test_a_cache_that_is_too_small_is_refused_with_what_is_needed(digits, tmp_path):
    with pytest.raises(InputError, match=r"cache_bytes must be at least ([\d,]+) for .* got 20,000: raise") as caught:
        run(digits, tmp_path / "refused", cache_bytes=20_000)
    needed = int(caught.value.message.split("at least ")[1].split()[0].replace(",", ""))
    with pytest.raises(InputError, match=f"at least {needed:,} for"):
        run(digits, tmp_path / "refused", cache_bytes=needed - 1)
    run(digits, tmp_path / "enough", cache_bytes=needed)


def test_what_a_kill_has_left_is_removed_by_the_next_start(alone, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_CACHE_DIR", str(tmp_path / "cache"))
    for number in (0, 1):
        left = tmp_path / "cache" / "ddp-blocks" / f"abc-{number}" / "3"
        left.mkdir(parents=True)
        (left / "train-7.npy").write_bytes(b"half")
        (left.parent / "3.alive").touch()
    run(digits, tmp_path / "trained")
    assert os.listdir(tmp_path / "cache" / "ddp-blocks") == [".lock"]


def test_validation_takes_whole_blocks(alone, digits, tmp_path):
    found, _, events = run(digits, tmp_path / "trained", validation_fraction=0.2)
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.validation_samples in (114, 120)
    assert started.train_samples + started.validation_samples == SAMPLES
    assert found.best_epoch
    with pytest.raises(InputError, match=r"takes whole blocks and must leave one on either side of 61, got 0\.001"):
        run(digits, tmp_path / "refused", validation_fraction=0.001)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("Iterated", "IterableDataset has no order .* return Blocks"),
        ("Twice", "passes_per_epoch must be 1 with Blocks"),
    ],
)
def test_what_has_no_order_is_refused(alone, digits, tmp_path, recipe, words):
    with pytest.raises(InputError, match=words):
        run(digits, tmp_path, recipe=recipe)


@pytest.mark.parametrize("value", [0, 2.5, None])
def test_an_attribute_that_is_no_count_is_refused(alone, digits, tmp_path, monkeypatch, value):
    monkeypatch.setattr(Blocks, "threads", value)
    with pytest.raises(InputError, match=f"threads of Blocks must be a whole number of at least 1, got {value}"):
        run(digits, tmp_path)


PROBLEMS = {
    "raises": r"block \d+ could not be read: RuntimeError: no such animal\n(?s:.)*block_recipes.py",
    "type": r"block \d+ has samples of .*<f8.*, where others have .*<f4",
    "missing": r"block \d+ has samples of .*, where others have .*label",
    "shorter": r"block \d+ has 9 samples, where 10 were announced",
    "uneven": r"block \d+: all arrays must have as many rows, got \[9, 10\]",
    "words": r"block \d+: label: samples must be arrays of numbers \(n, ...\), got <U1 \(10,\): encode",
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_block_that_is_wrong_ends_the_run_with_its_name(alone, tmp_path, problem):
    folder = tmp_path / f"blocks-{problem}"
    folder.mkdir()
    with pytest.raises(Exception, match=PROBLEMS[problem]) as caught:
        run(folder, tmp_path / "trained", recipe="Broken")
    assert type(caught.value).__name__ == "DataError"


def test_a_file_without_rows_is_named(tmp_path):
    np.save(tmp_path / "block.npy", np.float32(1))
    with pytest.raises(DataError, match="block 7 has no samples, where 3 were announced"):
        open_rows(tmp_path / "block.npy", 3, "block 7")


@pytest.mark.slow
def test_a_task_trains_on_what_stays_in_the_storage(digits, tmp_path, monkeypatch):
    """By Flyte's settings, which the ranks get with the job; the checkpoint belongs to the index, not to the URL."""
    with object_storage() as server:
        for path in digits.rglob("*.*"):
            server.objects[f"bucket/digits/{path.relative_to(digits)}"] = path.read_bytes()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("fsspec.config.conf", {})
        access = FileAccessProvider(str(tmp_path / "here"), str(tmp_path / "there"), DataConfig.auto())
        monkeypatch.setattr(flytekit_platform, "storage", lambda: access)  # flytekit reads its settings when imported
        data = stream(FlyteDirectory("s3://bucket/digits"))
        assert data.digest == stream(FlyteDirectory(str(digits))).digest
        monkeypatch.delenv("FLYTE_AWS_ENDPOINT")
        subject = make_subject(find_code(f"{RECIPES}:Stored"), Settings(epochs=1), data)
        job = job_in(tmp_path, subject, RunOptions())
        launcher.launch("flyte_ddp.engine.worker:run", choose_world("gloo", 2, 24), job, 120, lambda event: None)
        weights = torch.load(tmp_path / "model.pt", weights_only=True)
        expected = run(digits, tmp_path / "local", 2, epochs=1)[1]
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        server.objects["bucket/digits/train/index.json"] += b" "
        assert stream(FlyteDirectory("s3://bucket/digits")).digest != data.digest
