"""An object storage on loopback that speaks as much of S3 as fsspec and obstore need to put, get and list objects."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class ObjectStorage(ThreadingHTTPServer):
    """objects: by bucket/key. parts: of unfinished uploads, by bucket/key and number. failures: how many of the next
    reads fail, with this status and code. drips: how many of the next objects come byte by byte, too slowly. hanging:
    reads wait while it is not set. ended: that the storage ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.failures, self.failure = 0, (400, "Refused")
        self.drips, self.ended = 0, threading.Event()
        self.hanging = threading.Event()
        self.hanging.set()

    @property
    def environment(self) -> dict[str, str]:
        """By which flytekit finds it."""
        return {
            "FLYTE_AWS_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "FLYTE_AWS_ACCESS_KEY_ID": "key",
            "FLYTE_AWS_SECRET_ACCESS_KEY": "word",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectStorage

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            size, rest = body.split(b"\r\n", 1)
            body = rest[: int(size.split(b";")[0], 16)]
        if self.headers.get("If-None-Match") == "*" and self.key in self.server.objects:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        if number := self.query.get("partNumber"):
            self.server.parts[self.key][int(number[0])] = body
        else:
            self.server.objects[self.key] = body
        self.answer(200, ETag='"0"')

    def do_POST(self) -> None:
        """An upload in parts begins or ends; or objects are deleted."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        if "delete" in self.query:
            for key in re.findall("<Key>(.*?)</Key>", body):
                self.server.objects.pop(f"{self.key.partition('/')[0]}/{key}", None)
            self.answer(200, b"<DeleteResult></DeleteResult>")
        elif "uploads" in self.query:
            self.server.parts[self.key] = {}
            name = self.key.partition("/")
            id_of = f"<Bucket>{name[0]}</Bucket><Key>{name[2]}</Key><UploadId>1</UploadId>"
            self.answer(200, f"<InitiateMultipartUploadResult>{id_of}</InitiateMultipartUploadResult>".encode())
        else:
            parts = self.server.parts.pop(self.key)
            self.server.objects[self.key] = b"".join(parts[number] for number in sorted(parts))
            done = '<CompleteMultipartUploadResult><ETag>"0"</ETag></CompleteMultipartUploadResult>'
            self.answer(200, done.encode())

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.key, None)
        self.answer(204)

    def do_GET(self) -> None:
        self.server.hanging.wait()
        if self.server.failures:
            self.server.failures -= 1
            status, code = self.server.failure
            self.answer(status, f"<Error><Code>{code}</Code><Message>not now</Message></Error>".encode())
            return
        if "list-type" in self.query:
            self.list_objects(self.query.get("prefix", [""])[0], bool(self.query.get("delimiter", [""])[0]))
        elif self.key not in self.server.objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            content, more = self.server.objects[self.key], {"ETag": '"0"'}
            asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked:
                first, total = int(asked[1]), len(content)
                content = content[first : int(asked[2]) + 1 if asked[2] else None]
                more["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{total}"
            self.answer(206 if asked else 200, content, **more)

    def do_HEAD(self) -> None:
        self.do_GET()

    def list_objects(self, prefix: str, by_folder: bool) -> None:
        bucket, folders, files = self.key.split("/")[0], set(), []
        for name, content in sorted(self.server.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if key == name or not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if by_folder and "/" in rest:
                folders.add(prefix + rest.split("/")[0] + "/")
            else:
                stamp = "2026-11-22T00:00:00.000Z"
                files.append(
                    f"<Contents><Key>{key}</Key><Size>{len(content)}</Size><LastModified>{stamp}</LastModified>"
                    '<ETag>"0"</ETag></Contents>'
                )
        listed = "".join([*files, *(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in folders)])
        count = f"<IsTruncated>false</IsTruncated><KeyCount>{len(files) + len(folders)}</KeyCount>"
        space = "http://s3.amazonaws.com/doc/2006-03-01/"
        self.answer(200, f'<ListBucketResult xmlns="{space}">{count}{listed}</ListBucketResult>'.encode())

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command == "HEAD":
            return
        if not self.server.drips or "Content-Range" not in headers:
            self.wfile.write(content)
            return
        self.server.drips -= 1
        with suppress(OSError):  # nobody waits for the end
            for byte in content:
                self.wfile.write(bytes([byte]))
                if self.server.ended.wait(0.02):
                    break

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def object_storage() -> Iterator[ObjectStorage]:
    with ObjectStorage() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
