"""Serves the promoted image classifier over HTTP: python -m flyte_ddp.promote.serve PLACE

GET / says which version is served; POST / with an image file answers with its class, and the probability of each. A
promotion, or a roll-back, is followed within some seconds. It answers from one process: for more, run more of them.
"""

import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.data.image_files import decode, reason
from flyte_ddp.errors import InputError
from flyte_ddp.launch.signals import on_signals
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.promote.place import Place, local_root
from flyte_ddp.recipe import CPU
from flyte_ddp.recipes.images import Normaliser
from flyte_ddp.recipes.models import load_model
from flyte_ddp.report.console import say, show_output

LOOK_SECONDS = 10.0  # between two looks at which version is promoted
CLIENT_SECONDS = 60.0  # without a byte, after which a client that has stopped sending is given up
MOST_BYTES = 20 << 20  # of an image


class Version(NamedTuple):
    """What answers: a promoted classifier, its metadata, and how its images are normalised."""

    name: str
    model: torch.nn.Module
    facts: dict[str, Any]
    normalise: Normaliser


class Served:
    """The promoted classifier; a version that cannot be loaded leaves the one before."""

    def __init__(self, place: Place):
        self._place, self._looking = place, threading.Lock()
        self._turns = threading.Semaphore(os.cpu_count() or 1)  # more images at once would only take memory
        self._loaded = self._load(self._newest_name())

    def newest(self) -> Version:
        """The version that answers. One request at a time looks for what has been promoted since the last look, if that
        was long ago; the others do not wait for the storage."""
        if time.monotonic() >= self._due and self._looking.acquire(blocking=False):
            try:
                if (name := self._newest_name()) != self._loaded.name:
                    self._loaded = self._load(name)
            except Exception as problem:  # of the place, of a full disk, of a network that this code does not know
                say(f"Still serving {self._loaded.name}: {problem}")
            finally:
                self._looking.release()
        return self._loaded

    def _newest_name(self) -> str:
        self._due = time.monotonic() + LOOK_SECONDS
        if not (name := self._place.read().version):
            raise InputError(
                f"place {self._place.root} must have a promoted model to serve, but has none: promote one first"
            )
        return name

    def _load(self, name: str) -> Version:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.pt")
            self._place.fetch(name, path)
            metadata = read_metadata(path)
            if not metadata or not {"image_shape", "mean", "std", "classes"} <= metadata.facts.keys():
                raise InputError(f"version {name} in {self._place.root} must be an image classifier's")
            facts = metadata.facts
            loaded = Version(name, load_model(path), facts, Normaliser(facts["mean"], facts["std"], CPU))
        say(f"Serving {name}")
        return loaded

    @torch.inference_mode()
    def answer(self, image: bytes) -> dict[str, Any]:
        """Raises ValueError for what is no image."""
        name, model, facts, normalise = self.newest()
        with self._turns:
            try:
                pixels = torch.tensor(decode(io.BytesIO(image), tuple(facts["image_shape"])))
            except Exception as error:  # Pillow has many types
                raise ValueError(f"the body must be an image file: {reason(error)}") from None
            probabilities = model(normalise(pixels[None])).softmax(1)[0].tolist()
        by_class = dict(zip(facts["classes"], probabilities, strict=True))
        best = max(by_class, key=by_class.__getitem__)
        return {"version": name, "class": best, "probability": by_class[best], "probabilities": by_class}


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # of clients at once; with the default, 5, a dozen are enough for some to be turned away

    def handle_error(self, *request: Any) -> None:
        """Without the traceback of a client that has hung up."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*request)


def server(served: Served, host: str, port: int) -> Server:
    """Serves once serve_forever is called; port 0 is any that is free."""

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            self._reply(200, {"version": served.newest().name})

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            # of more digits than these, int would raise an error of its own
            size = int(length) if length.isdecimal() and len(length) < 20 else 0
            if not 0 < size <= MOST_BYTES:
                self.close_connection = True  # what follows is not read, or not all
                rule = f"the body must be an image file of at most {MOST_BYTES:,} bytes, with its Content-Length"
                self._reply(413, {"error": rule})
                left = min(size, 10 * MOST_BYTES)  # many clients read no answer before they have sent all
                while left and (piece := self.rfile.read1(min(left, 1 << 20))):
                    left -= len(piece)
                return None
            try:
                self._reply(200, served.answer(self.rfile.read(size)))
            except ValueError as error:
                self._reply(400, {"error": str(error)})

        def _reply(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Not of each request."""

    return Server((host, port), Handler)


def own_platform() -> Platform:
    """That of the Flyte that is installed; it says how the storage is opened."""
    try:
        from flyte_ddp.flyte2 import platform as of_flyte_2
    except ModuleNotFoundError:  # it is an extra
        from flyte_ddp.flyte1 import platform as of_flyte_1

        return of_flyte_1
    return of_flyte_2


@click.command()
@click.argument("place")
@click.option("--host", default="127.0.0.1", show_default=True, help="Whose requests: 0.0.0.0 is everyone's.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
def main(place: str, host: str, port: int) -> None:
    """Serve the image classifier that is promoted at PLACE, a folder or a URL of the storage."""
    show_output()
    if not place:
        raise InputError("place must be a folder or a URL, got '': DDP_PROMOTE_TO names it where an app is deployed")
    served = Served(Place(own_platform(), local_root(place)))
    try:
        http = server(served, host, port)
    except OSError as error:
        raise InputError(
            f"--host and --port must be free here, got {host}:{port}: {error.strerror}: choose others"
        ) from None
    # The first process of a container ends at no signal that it doesn't handle, but is killed, minutes later
    with on_signals([signal.SIGTERM], lambda *_: sys.exit(0)), http:
        say(f"Listening on http://{host}:{http.server_port}")
        http.serve_forever()


if __name__ == "__main__":
    main()
