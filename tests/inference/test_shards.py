"""Image files in another form than the network's, or in none."""

from dataclasses import replace

import pytest

from flyte_ddp.data.prepared.prepared import read_description
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.errors import InputError
from flyte_ddp.inference.rank import read_images
from flyte_ddp.inference.shards import InferenceOptions, Row, Shard, ShardJob, read_rows, write_rows
from flyte_ddp.launch.link import DirectLink, Link


def test_unreadable_file_is_a_reason_not_an_end(tmp_path):
    (tmp_path / "words.png").write_text("no image")
    description, files = read_description(prepare("digits")), ["words.png", "nowhere.png"]
    paths = [(name, str(tmp_path / name)) for name in files]
    job = ShardJob(Shard(0, 1, 0, 2, key=""), InferenceOptions(), "", "", paths, "")
    images, rows = read_images(job, description, Link())
    assert images.shape == (2, *description.image_shape)
    assert [(row.image, row.error) for row in rows] == [
        ("words.png", "not an image"), ("nowhere.png", "No such file or directory"),
    ]  # fmt: skip
    with pytest.raises(InputError, match="can have 1 or 3 channels, the dataset's have 2: leave folder out"):
        read_images(job, replace(description, image_shape=(2, 8, 8)), Link())


def test_a_process_that_reads_image_files_gives_signs_of_life():
    paths = [(name, name) for name in ("a.png", "b.png")]
    job = ShardJob(Shard(0, 1, 0, 2, key=""), InferenceOptions(), "", "", paths, "")
    link = DirectLink(lambda event: None)
    read_images(job, read_description(prepare("digits")), link)
    assert link.steps == 2


def test_a_table_of_predictions_holds_no_formulas(tmp_path):
    path = tmp_path / "predictions.csv"
    rows = [Row("=HYPERLINK(1)/é.png", "+1", "-1", "0.5", ""), Row("'a.png", "@a", "b", "", "\tnot an image")]
    write_rows(path, iter(rows))
    assert path.read_text().splitlines()[1] == "'=HYPERLINK(1)/é.png,'+1,'-1,0.5,"
    assert list(read_rows(path)) == rows
