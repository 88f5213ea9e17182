"""Serves the promoted image classifier over HTTP: python -m flyte_ddp.promote.serve PLACE

GET / says which version is served; POST / with an image file answers with its class, and the probability of each. A
promotion, or a roll-back, is followed within some seconds. It answers from one process: for more, run more of them.
"""

import io
import json
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import torch

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.data.image_files import decode
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.promote.place import Place
from flyte_ddp.recipe import CPU
from flyte_ddp.recipes.images import Normaliser
from flyte_ddp.recipes.models import load_model
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import say, show_output

LOOK_SECONDS = 10.0  # between two looks at which version is promoted
MOST_BYTES = 20 << 20  # of an image


class Served:
    """The promoted classifier; a version that cannot be loaded leaves the one before."""

    def __init__(self, place: Place):
        self._place, self._lock, self._due = place, threading.Lock(), 0.0
        self.version = ""
        self._load()
        if not self.version:
            raise InputError(f"place {place.root} must have a promoted model to serve, but has none: promote one first")

    def newest(self) -> str:
        """The version that answers."""
        with self._lock:
            self.follow()
            return self.version

    def follow(self) -> None:
        """Loads what has been promoted since the last look, if that was long ago."""
        if time.monotonic() >= self._due:
            try:
                self._load()
            except (InputError, ReportedError) as problem:
                say(f"Still serving {self.version}: {problem}")

    def _load(self) -> None:
        self._due = time.monotonic() + LOOK_SECONDS
        version = self._place.read().version
        if version != self.version:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.pt")
                self._place.fetch(version, path)
                metadata = read_metadata(path)
                if not metadata or "image_shape" not in metadata.facts:
                    raise InputError(f"version {version} in {self._place.root} must be an image classifier's")
                self._model, self._facts, self.version = load_model(path), metadata.facts, version
                self._normalise = Normaliser(self._facts["mean"], self._facts["std"], CPU)
            say(f"Serving {version}")

    @torch.inference_mode()
    def answer(self, image: bytes) -> dict[str, Any]:
        """Raises ValueError for what is no image."""
        with self._lock:
            self.follow()
            model, facts, version, normalise = self._model, self._facts, self.version, self._normalise
        try:
            pixels = torch.tensor(decode(io.BytesIO(image), tuple(facts["image_shape"])))
        except Exception as error:  # Pillow has many types
            raise ValueError(f"the body must be an image file: {one_line(error)}") from None
        probabilities = model(normalise(pixels[None])).softmax(1)[0].tolist()
        by_class = dict(zip(facts["classes"], probabilities, strict=True))
        best = max(by_class, key=by_class.__getitem__)
        return {"version": version, "class": best, "probability": by_class[best], "probabilities": by_class}


def server(served: Served, host: str, port: int) -> ThreadingHTTPServer:
    """Serves once serve_forever is called; port 0 is any that is free."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, {"version": served.newest()})

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not (length.isdecimal() and 0 < int(length) <= MOST_BYTES):
                self.close_connection = True  # what follows has not been read
                return self._reply(413, {"error": f"the body must be an image file of at most {MOST_BYTES:,} bytes"})
            try:
                self._reply(200, served.answer(self.rfile.read(int(length))))
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

    return ThreadingHTTPServer((host, port), Handler)


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
@click.option("--port", default=8080, show_default=True)
def main(place: str, host: str, port: int) -> None:
    """Serve the image classifier that is promoted at PLACE, a folder or a URL of the storage."""
    show_output()
    if not place:
        raise InputError("place must be a folder or a URL, got '': DDP_PROMOTE_TO names it where an app is deployed")
    root = place if "://" in place else str(Path(place).absolute())
    with server(Served(Place(own_platform(), root)), host, port) as http:
        say(f"Listening on http://{host}:{http.server_port}")
        http.serve_forever()


if __name__ == "__main__":
    main()
