"""An app that serves the image classifier promoted at DDP_PROMOTE_TO, a folder or a URL; see examples/README.md.

DDP_PROMOTE_TO=models flyte serve --local examples/serve/server.py environment
"""

import io
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from flyte.app.extras import FastAPIAppEnvironment

from flyte_ddp.data.image_files import decode, reason
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.environment import IMAGE
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.promote.place import Place, local_root
from flyte_ddp.recipes.images import Normaliser
from flyte_ddp.recipes.models import load_model

PLACE = os.environ.get("DDP_PROMOTE_TO", "models")
FORMATS = ("PNG", "JPEG")
MOST_BYTES = 20_000_000
served: dict[str, Any] = {}


@asynccontextmanager
async def load_promoted(_: FastAPI) -> AsyncIterator[None]:
    place = Place(platform, local_root(PLACE))
    version = place.read().version
    if not version:
        raise LookupError(f"{place.root} must have a promoted model, and has none: promote one first")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        place.fetch(version, path)
        served.update(read_metadata(path).facts, version=version, model=load_model(path))
    yield


app = FastAPI(lifespan=load_promoted)
environment = FastAPIAppEnvironment("classifier", app=app, image=IMAGE, env_vars={"DDP_PROMOTE_TO": PLACE})


@app.post("/")
async def answer(request: Request) -> dict[str, Any]:
    file = bytearray()
    async for piece in request.stream():
        file += piece
        if len(file) > MOST_BYTES:
            raise HTTPException(413, f"an image file must have at most {MOST_BYTES:,} bytes: scale it down")
    try:
        pixels = torch.tensor(decode(io.BytesIO(file), tuple(served["image_shape"]), FORMATS))
    except Exception as error:  # Pillow raises many types
        raise HTTPException(400, f"the body must be a file of {' or '.join(FORMATS)}: {reason(error)}") from None
    images = Normaliser(served["mean"], served["std"], torch.device("cpu"))(pixels[None])
    with torch.inference_mode():
        scores = served["model"](images).softmax(1)[0]
    probabilities = dict(zip(served["classes"], scores.tolist(), strict=True))
    return {"version": served["version"], "class": served["classes"][scores.argmax()], "probabilities": probabilities}
