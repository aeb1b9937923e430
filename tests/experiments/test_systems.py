"""The suites 'scaling' and 'systems' of benchmark.py finish and return their measurements."""

import pytest

import benchmark
import systems


def test_a_span_has_a_time_and_a_memory_for_each_size(monkeypatch, tmp_path):
    for name, value in dict(SIZES=(33, 65), SPANS=(None, 65), ROWS_OF_STRIP=2).items():
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(benchmark, "peak_memory", lambda make, form: 1000)
    works, _ = benchmark.scaling()
    assert list(works["strip"]) == [(33, None), (33, 65), (65, None), (65, 65)]
    assert all(measured["median_s"] > 0 and measured["peak_bytes"] == 1000 for measured in works["strip"].values())
    benchmark.show(works, {"x": 1.5})
    benchmark.draw(works, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000


@pytest.mark.slow  # Mask R-CNN twice
def test_the_benchmark_has_a_ratio_for_each_system(monkeypatch):
    for name, value in dict(WORDS=64, SENTENCES=2, TOKENS=8, SIDE=128).items():
        monkeypatch.setattr(systems, name, value)
    _, ratios = systems.benchmark()
    assert set(ratios) == {"translation_speed_over_official", "detection_speed_over_official"}
    assert all(ratio > 0 for ratio in ratios.values())
