"""Servers on loopback that deliver a file, or misbehave in one of many ways."""

import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT = bytes(range(256)) * 1000


def answer(request, body, status=200, length=None, **headers):
    request.send_response(status)
    request.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


def good(request, ended):
    answer(request, CONTENT)


def silent(request, ended):
    ended.wait()


def silent_midway(request, ended):
    answer(request, CONTENT[:5000], length=len(CONTENT))
    ended.wait()


def drip(request, ended):
    answer(request, b"", length=len(CONTENT))
    for byte in CONTENT:
        request.wfile.write(bytes([byte]))
        if ended.wait(0.02):
            break


def drip_of_headers(request, ended):
    request.wfile.write(b"HTTP/1.0 200 OK\r\n")
    while not ended.wait(0.05):
        request.wfile.write(b"X")


def cut_midway(request, ended):
    answer(request, CONTENT[:5000], length=len(CONTENT))


def endless(request, ended):
    request.send_response(200)
    request.end_headers()
    while not ended.is_set():
        request.wfile.write(bytes(2**16))


HOSTILE = {
    "404": (lambda request, ended: request.send_error(404), "HTTP status 404 Not Found"),
    "403": (lambda request, ended: request.send_error(403), "HTTP status 403 Forbidden"),
    "500": (lambda request, ended: request.send_error(500), "HTTP status 500 Internal Server Error"),
    "hang": (silent, "no answer in time"),
    "hang midway": (silent_midway, "fell silent midway for 0.3 s"),
    "drip": (drip, "too slow"),
    "drip of headers": (drip_of_headers, "no answer in time"),
    "cut midway": (cut_midway, "connection cut midway"),
    "closed": (lambda request, ended: None, "connection closed without an answer"),
    "garbage": (lambda request, ended: request.wfile.write(b"\0\1\2\n" * 9), "connection closed without an answer"),
    "truncated": (lambda request, ended: answer(request, CONTENT[:5000]), "another file, or a damaged one"),
    "wrong": (lambda request, ended: answer(request, CONTENT[::-1]), "another file, or a damaged one"),
    "empty": (lambda request, ended: answer(request, b""), "another file, or a damaged one"),
    "HTML": (lambda request, ended: answer(request, b"\n<!DOCTYPE html><html>Log in"), "a web page instead"),
    "redirect loop": (lambda request, ended: answer(request, b"", 302, Location=request.path), "redirects in a circle"),
    "redirect to a file": (lambda request, ended: answer(request, b"", 302, Location="file:///etc/hosts"), "not http"),
    "endless": (endless, "larger than 1,048,576 bytes"),
    "huge": (lambda request, ended: answer(request, CONTENT, length=10**12), "larger than 1,048,576 bytes"),
}


@contextmanager
def served(behave):
    """A server on a free loopback port; `behave` answers each GET. Gives its URL and the list of paths asked for."""
    ended, asked = threading.Event(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            with suppress(OSError):  # the client has had enough
                behave(self, ended)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
