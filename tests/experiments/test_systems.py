"""The study's systems beside tf-models-official's: the steps run, and both networks are of one size."""

import pytest

import systems


@pytest.mark.slow  # Mask R-CNN twice
def test_the_benchmark_has_a_ratio_for_each_system(monkeypatch):
    for name, value in dict(WORDS=64, SENTENCES=2, TOKENS=8, SIDE=128).items():
        monkeypatch.setattr(systems, name, value)
    result = systems.benchmark(quick=True)
    assert set(result["ratios"]) == {"translation_speed_over_official", "detection_speed_over_official"}
    assert all(ratio > 0 for ratio in result["ratios"].values())
