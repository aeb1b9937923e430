"""The suites of benchmark.py that have a file of their own run."""

import pytest

import scaling
import systems


def test_a_span_has_a_time_and_a_memory_for_each_size(monkeypatch, tmp_path):
    for name, value in dict(SIZES=(33, 65), ROWS=2).items():
        monkeypatch.setattr(scaling, name, value)
    monkeypatch.setattr(scaling, "peak_memory", lambda step: 1000)
    rows = scaling.benchmark(quick=True)
    assert [(row["length"], row["span"], row["pixels"]) for row in rows] == [
        (9, None, 18),
        (9, 65, 18),
        (17, None, 34),
        (17, 65, 34),
    ]
    assert all(row["seconds"] > 0 for row in rows)
    scaling.draw(rows, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000


@pytest.mark.slow  # Mask R-CNN twice
def test_the_benchmark_has_a_ratio_for_each_system(monkeypatch):
    for name, value in dict(WORDS=64, SENTENCES=2, TOKENS=8, SIDE=128).items():
        monkeypatch.setattr(systems, name, value)
    ratios = systems.benchmark(quick=True)["ratios"]
    assert set(ratios) == {"translation_speed_over_official", "detection_speed_over_official"}
    assert all(ratio > 0 for ratio in ratios.values())
