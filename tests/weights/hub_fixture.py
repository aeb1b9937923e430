"""A server on this machine that answers the package huggingface_hub as the hub does. It has one repository, me/nano."""

import hashlib
import http.server
import json
import os
import pathlib
import threading

import pytest

COMMIT = "1" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """Lists the files of a revision, and sends a file. All revisions are the same commit."""

    folder = pathlib.Path()

    def log_message(self, *_):
        """Writes no line for a request."""

    def do_GET(self):
        verb, name = "api", ""
        for start in ("/api/models/me/nano/revision/", "/api/models/me/nano/tree/", "/me/nano/resolve/"):
            if self.path.startswith(start):
                verb = start.split("/")[-2]
                name = self.path.removeprefix(start).partition("?")[0].partition("/")[2]
        files = {p.relative_to(self.folder).as_posix(): p for p in self.folder.rglob("*") if p.is_file()}
        if "/me/nano" not in self.path:
            self.send(404, error="RepoNotFound")
        elif verb == "resolve":
            self.send(200, files[name].read_bytes())
        elif verb == "tree":
            entries = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": n} for n, p in files.items()]
            self.send(200, json.dumps(entries).encode())
        else:
            listed = {"id": "me/nano", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.send(200, json.dumps(listed).encode())

    do_HEAD = do_GET

    def send(self, status, body=b"", error=""):
        """Sends a response; only its headers if HEAD asks for it."""
        self.send_response(status)
        digest = hashlib.sha256(body).hexdigest()
        headers = {"Content-Length": len(body), "ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "X-Error-Code": error}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="session")
def hub_server():
    """Starts the server. huggingface_hub reads its address from the environment when it is imported."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        yield
        server.shutdown()


@pytest.fixture
def hub_of(hub_server, tmp_path, monkeypatch):
    """A function that makes a folder the repository me/nano. The client's cache is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub_cache"))
    return lambda folder: monkeypatch.setattr(Hub, "folder", folder)
