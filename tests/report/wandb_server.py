"""As much of a Weights & Biases server, on this host, as a run needs; or one that refuses, or falls silent."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

PROJECT = {"id": "cA==", "name": "proj", "entity": {"id": "ZQ==", "name": "ent"}}


class Server:
    """Mood: answers; forbids (403 to all); fails (500); silent (never answers); stops (takes the run, then silent);
    refuses (takes the run, then 403 to what is sent for it, as one that was deleted, or beyond a quota)."""

    def __init__(self, mood: str):
        self.operations: list[str] = []
        self.variables: list[dict[str, Any]] = []
        self.uploads: dict[str, bytes] = {}
        self.history: list[dict[str, Any]] = []
        self.exit_code: int | None = None
        self.mood, self._end = mood, threading.Event()
        self._http = QuietServer(("127.0.0.1", 0), type("Handler", (Handler,), {"told": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "Server":
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._http.shutdown()
        self._http.server_close()

    def hang(self) -> None:
        self._end.wait(120)

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        operation = found[1] if found else ""
        self.operations.append(operation)
        self.variables.append(variables)
        if operation == "RunResumeStatus" and self.history:
            return {"model": {**PROJECT, "bucket": self._resumed(variables["name"])}}
        if operation == "UpsertBucket":
            bucket = {"id": "aWQ=", "name": variables["name"], "displayName": "d", "config": "{}", "project": PROJECT}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/up/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "aWQ=", "uploadHeaders": [], "files": files}}
        if operation == "Viewer":
            viewer = {"id": "dg==", "entity": "ent", "username": "u", "email": "u@e", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}}
        if operation == "CreateArtifact":
            sequence = {"id": "cw==", "name": "table", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": "YQ==", "state": "COMMITTED", "artifactSequence": sequence}}}
        return {"project": None} if operation == "ArtifactType" else {}

    def _resumed(self, name: str) -> dict[str, Any]:
        """What it has of a run that another process has begun."""
        last = json.dumps({key: value for row in self.history for key, value in row.items()})
        return {
            "id": "aWQ=",
            "name": name,
            "displayName": "d",
            "tags": [],
            "config": "{}",
            "wandbConfig": '{"t": 1}',
            "summaryMetrics": last,
            "historyTail": json.dumps([last]),
            "eventsTail": "[]",
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
        }


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Those who gave up waiting have hung up."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    told: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer({})

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self.told.uploads[self.path.removeprefix("/up/")] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        if self.path == "/graphql":
            self._answer({"data": self.told.graphql(body["query"], body.get("variables") or {})})
            return
        if self.told.mood == "stops":
            self.told.hang()
        if self.told.mood == "refuses":
            self._answer({}, 403)
            return
        lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.told.history += map(json.loads, lines)
        self.told.exit_code = body.get("exitcode", self.told.exit_code)
        self._answer({"limits": {}})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: Any, status: int = 200) -> None:
        if self.told.mood == "silent":
            self.told.hang()
        body = json.dumps(content).encode()
        self.send_response({"forbids": 403, "fails": 500}.get(self.told.mood, status))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
