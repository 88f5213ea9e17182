"""The promoted model answers requests, follows promotions, and survives nonsense."""

import io
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from flyte_ddp.data.prepared import prepared
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.flyte1 import platform as flyte1_platform
from flyte_ddp.flyte2 import platform
from flyte_ddp.promote import serve
from flyte_ddp.promote.place import PROMOTED, Place
from flyte_ddp.whole_files import content_digest
from tests.commands import ROOT, free_port, words


def promoted(place, model, version):
    place.add(version, model, {"sha256": content_digest(model)})
    assert place.point(place.read(), version, PROMOTED)


@pytest.fixture
def place(whole, tmp_path):
    """With a small training's model."""
    place = Place(platform, str(tmp_path / "place"))
    promoted(place, whole(2, epochs=4).folder / "model.pt", "one")
    return place


@contextmanager
def serving(http):
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/"
    http.shutdown()
    thread.join()


@pytest.fixture
def url(place, monkeypatch):
    monkeypatch.setattr(serve, "LOOK_SECONDS", 0.0)
    with serve.server(serve.Served(place), "127.0.0.1", 0) as http, serving(http) as url:
        yield url


def ask(url, body=None):
    try:
        with urllib.request.urlopen(url, body, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels[0]).save(file, "PNG")
    return file.getvalue()


def test_images_get_the_classes_that_the_training_gave_them(url, whole, small_data):
    trained = whole(2, epochs=4)
    images, labels = prepared.open_split(small_data, "test")
    answers = [ask(url, png(image)) for image in images]
    assert {status for status, _ in answers} == {200}
    right = np.mean([answer["class"] == str(label) for (_, answer), label in zip(answers, labels, strict=True)])
    assert right == pytest.approx(trained.result.tested["accuracy"])
    (_, answer), *_ = answers
    assert sum(answer["probabilities"].values()) == pytest.approx(1)
    assert answer["probability"] == answer["probabilities"][answer["class"]] == max(answer["probabilities"].values())
    assert ask(url) == (200, {"version": "one"})


@pytest.mark.slow
def test_a_promotion_is_followed_and_a_damaged_one_is_not(url, place, whole, small_data, capsys):
    image = png(prepared.open_split(small_data, "test")[0][0])
    promoted(place, whole(2, seed=2).folder / "model.pt", "two")
    assert ask(url, image)[1]["version"] == "two"
    promoted(place, whole(2, seed=2).folder / "model.pt", "three")
    model = Path(place.root, "versions", "three", "model.pt")
    model.write_bytes(model.read_bytes()[:-1])
    assert ask(url, image)[1]["version"] == "two"
    assert "Still serving two: version three" in capsys.readouterr().err


def test_a_place_that_is_gone_is_said_and_the_version_before_still_served(url, place, capsys):
    Path(place.root).rename(f"{place.root} elsewhere")
    assert ask(url) == (200, {"version": "one"})
    assert f"Still serving one: place {place.root} must have a promoted model" in words(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [(b"no image", 400, "must be an image file: not an image"), (b"", 413, "must be an image file of at most")],
)
def test_what_is_no_image_is_refused_and_the_next_is_answered(url, small_data, body, status, says):
    refused, answer = ask(url, body)
    assert refused == status
    assert says in answer["error"]
    assert ask(url, png(prepared.open_split(small_data, "test")[0][0]))[0] == 200


def test_a_client_that_sends_too_much_reads_the_answer(url, small_data):
    refused, answer = ask(url, bytes(serve.MOST_BYTES + 1))
    assert refused == 413
    assert "must be an image file of at most 20,971,520 bytes" in answer["error"]


def test_many_clients_at_once_are_all_answered(place):
    with serve.server(serve.Served(place), "127.0.0.1", 0) as http:  # all come before the first is answered
        clients = [socket.create_connection(("127.0.0.1", http.server_port), timeout=2) for _ in range(50)]
        with serving(http):
            for client in clients:
                client.settimeout(30)
                client.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.0 200")
                client.close()


def test_while_one_request_looks_for_a_promotion_the_others_are_answered(url, place, monkeypatch):
    is_looking, has_answered = threading.Event(), threading.Event()

    def slow_storage():
        is_looking.set()
        assert has_answered.wait(30)
        raise ReportedError("the storage does not answer")

    monkeypatch.setattr(place, "read", slow_storage)
    first = threading.Thread(target=ask, args=(url,))
    first.start()
    assert is_looking.wait(30)
    assert ask(url) == (200, {"version": "one"})
    has_answered.set()
    first.join()


def test_a_client_that_stops_sending_is_given_up(place, monkeypatch):
    monkeypatch.setattr(serve, "CLIENT_SECONDS", 0.1)
    with (
        serve.server(serve.Served(place), "127.0.0.1", 0) as http,
        serving(http),
        socket.create_connection(("127.0.0.1", http.server_port), timeout=30) as client,
    ):
        client.sendall(b"POST / HTTP/1.0\r\nContent-Length: 100\r\n\r\nhalf")
        assert client.recv(100) == b""


def test_a_length_that_is_no_number_for_python_is_refused(place):
    with (
        serve.server(serve.Served(place), "127.0.0.1", 0) as http,
        serving(http),
        socket.create_connection(("127.0.0.1", http.server_port), timeout=30) as client,
    ):
        client.sendall(b"POST / HTTP/1.0\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.0 413")


def test_a_client_that_hangs_up_leaves_no_traceback(place, capsys):
    with serve.server(serve.Served(place), "127.0.0.1", 0) as http:
        for kind, is_said in ((BrokenPipeError, False), (RuntimeError, True)):
            try:
                raise kind
            except Exception:
                http.handle_error(None, ("127.0.0.1", 1))
            assert ("Traceback" in capsys.readouterr().err) == is_said


def test_without_a_promoted_model_it_does_not_start(tmp_path):
    with pytest.raises(InputError, match="must have a promoted model to serve, but has none: promote one first"):
        serve.Served(Place(platform, str(tmp_path)))


def test_a_place_that_is_not_named_is_refused_with_the_variable_that_names_it():
    done = CliRunner().invoke(serve.main, [""])
    assert done.exit_code == 2
    assert "place must be a folder or a URL, got '': DDP_PROMOTE_TO names it" in words(done.output)


def test_a_port_that_another_program_has_is_one_error(place):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = CliRunner().invoke(serve.main, [place.root, "--port", str(port)])
    assert done.exit_code == 2
    assert f"--host and --port must be free here, got 127.0.0.1:{port}: Address already in use" in words(done.output)


def test_where_flyte_2_is_not_installed_it_serves_too(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "flyte_ddp.flyte2", None)
    assert serve.own_platform() is flyte1_platform
    assert serve.Served(Place(serve.own_platform(), place.root)).newest().name == "one"


@pytest.mark.slow
def test_the_apps_command_serves(place, small_data, monkeypatch):
    monkeypatch.setenv("DDP_PROMOTE_TO", place.root)
    shown = "import flyte2.serve; import json; print(json.dumps(flyte2.serve.app.command))"
    done = subprocess.run([sys.executable, "-c", shown], cwd=ROOT, check=True, capture_output=True, text=True)
    _, *command = json.loads(done.stdout)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *command[:-1], "127.0.0.1", "--port", str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    try:
        assert any("Listening" in line for line in process.stderr)
        assert ask(f"http://127.0.0.1:{port}/") == (200, {"version": "one"})
    finally:
        process.terminate()
        assert process.wait() == 0  # by its own doing: as the first process of a container it would not be ended
