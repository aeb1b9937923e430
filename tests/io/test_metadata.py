"""Values that Google Cloud's metadata server returns."""

import pytest

from axial.io import metadata
from tests.io.web_fixture import answering

PREFIX = "/computeMetadata/v1/instance/"


@pytest.fixture
def answers(monkeypatch):
    """dict from paths to the texts that a fake server returns. The server answers other paths with 404."""
    texts = {}
    with answering(texts) as address:
        monkeypatch.setenv(metadata.HOST_VARIABLE, address)
        yield texts


def test_the_environment_of_a_tpu(answers):
    assert metadata.tpu_environment() == {}
    answers[f"{PREFIX}attributes/tpu-env"] = "ZONE: 'a-b'\nWORKER_ID: '3'\nnot one of them\n"
    assert metadata.tpu_environment() == {"ZONE": "a-b", "WORKER_ID": "3"}


@pytest.mark.parametrize("name, value", [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("preempted", "TRUE")])
def test_a_notice_is_of_a_maintenance_or_a_preemption(answers, name, value):
    assert metadata.notice() is None
    answers |= {f"{PREFIX}maintenance-event": "NONE", f"{PREFIX}preempted": "FALSE"}
    assert metadata.notice() is None
    answers[PREFIX + name] = f"{value}\n"
    assert metadata.notice() == f"{name} {value}"


def test_another_machine_asks_nobody(monkeypatch, tmp_path):
    monkeypatch.delenv(metadata.HOST_VARIABLE, raising=False)
    monkeypatch.setattr(metadata, "PRODUCT_FILE", str(tmp_path / "product_name"))
    monkeypatch.setattr(metadata.urllib.request, "urlopen", lambda *_, **__: pytest.fail("it asked"))
    assert metadata.instance("attributes/tpu-env") is None and metadata.tpu_environment() == {}
    assert metadata.notice() is None
