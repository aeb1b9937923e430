"""What Google Cloud's metadata server says of a machine."""

import http.server
import threading

import pytest

from axial.io import metadata


@pytest.fixture
def answers(monkeypatch):
    """dict from paths below instance/ to what the server says there; it says 404 elsewhere."""
    texts = {}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = texts.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(metadata.HOST_VARIABLE, f"127.0.0.1:{server.server_port}")
        yield texts
        server.shutdown()


def test_the_environment_of_a_tpu(answers):
    assert metadata.tpu_environment() == {}
    answers["attributes/tpu-env"] = "ZONE: 'a-b'\nWORKER_ID: '3'\nnot one of them\n"
    assert metadata.tpu_environment() == {"ZONE": "a-b", "WORKER_ID": "3"}


@pytest.mark.parametrize("name, value", [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("preempted", "TRUE")])
def test_a_notice_is_of_a_maintenance_or_a_preemption(answers, name, value):
    assert metadata.notice() is None
    answers |= {"maintenance-event": "NONE", "preempted": "FALSE"}
    assert metadata.notice() is None
    answers[name] = f"{value}\n"
    assert metadata.notice() == f"{name} {value}"


def test_another_machine_asks_nobody(monkeypatch, tmp_path):
    monkeypatch.delenv(metadata.HOST_VARIABLE, raising=False)
    monkeypatch.setattr(metadata, "PRODUCT_FILE", str(tmp_path / "product_name"))
    monkeypatch.setattr(metadata.urllib.request, "urlopen", lambda *_, **__: pytest.fail("it asked"))
    assert metadata.instance("attributes/tpu-env") is None and metadata.tpu_environment() == {}
    assert metadata.notice() is None
