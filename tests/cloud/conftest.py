"""Fixtures of this folder."""

from tests.cloud.slice_fixture import here  # noqa: F401, a fixture
