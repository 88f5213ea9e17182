"""The example that serves a promoted model, as its user runs it."""

import io
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from flyte_ddp.data.prepared import prepared
from flyte_ddp.flyte2 import platform
from flyte_ddp.promote.place import PROMOTED, Place
from flyte_ddp.whole_files import content_digest
from tests.commands import ROOT, words

pytest.importorskip("fastapi", reason="examples/serve needs fastapi and uvicorn, which no lock has")
pytest.importorskip("uvicorn", reason="examples/serve needs fastapi and uvicorn, which no lock has")


def ask(body):
    try:
        with urllib.request.urlopen("http://127.0.0.1:8080/", body, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["detail"]


def encoded(pixels, form):
    file = io.BytesIO()
    Image.fromarray(pixels[0]).save(file, form)
    return file.getvalue()


def serve(place):
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        ["flyte", "serve", "--local", "examples/serve/server.py", "environment"],
        cwd=ROOT, env={**os.environ, "DDP_PROMOTE_TO": place, "PYTHONPATH": paths},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_promoted_model_answers_with_the_classes_that_its_training_gave(whole, small_data, tmp_path):
    trained, place = whole(2, epochs=4), Place(platform, str(tmp_path / "place"))
    model = trained.folder / "model.pt"
    place.add("one", model, {"sha256": content_digest(model)})
    assert place.point(place.read(), "one", PROMOTED)
    server = serve(place.root)
    try:
        assert any("startup complete" in line for line in server.stdout)
        images, labels = prepared.open_split(small_data, "test")
        answers = [ask(encoded(image, "PNG")) for image in images]
        right = np.mean([answer["class"] == str(label) for (_, answer), label in zip(answers, labels, strict=True)])
        assert right == pytest.approx(trained.result.tested["accuracy"])
        assert {answer["version"] for _, answer in answers} == {"one"}
        assert sum(answers[0][1]["probabilities"].values()) == pytest.approx(1)
        assert ask(encoded(images[0], "JPEG"))[0] == 200
        # Pillow reads GIF, too, but no more formats than those that the server names
        refused = (400, "the body must be a file of PNG or JPEG: not an image")
        assert ask(encoded(images[0], "GIF")) == ask(b"no image") == ask(b"") == refused
        assert ask(bytes(20_000_001)) == (413, "an image file must have at most 20,000,000 bytes: scale it down")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
def test_without_a_promoted_model_the_app_says_so_and_ends(tmp_path):
    server = serve(str(tmp_path))
    try:
        assert f"{tmp_path} must have a promoted model, and has none: promote one first" in words(server.stdout.read())
        assert server.wait() != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
