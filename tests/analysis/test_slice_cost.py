"""Cost of a run on a slice."""

import re

import pytest

from axial import slices
from axial.analysis import slice_cost as cost
from axial.io import schemas


def test_estimates_say_where_they_are_from():
    v5e, v2 = slices.find_slice("v5e-16"), slices.find_slice("v2-8")
    status = schemas.RunStatus("training", 10, 100, seconds_per_step=0.5, updated="2026-11-23T12:00:00Z")
    assert cost.step_time(v5e) is None
    assert cost.step_time(v5e, given=2.0, status=status, cycles=1e9)[1] == "--seconds_per_step"
    assert cost.step_time(v5e, status=status, cycles=1e9)[1].startswith("measured by this run, 2026-11-23")
    seconds, source = cost.step_time(v5e, cycles=3e9)
    assert seconds == pytest.approx(3e9 / 1.503e9, rel=1e-3) and "cost model" in source
    assert cost.step_time(v2, cycles=1e9) is None  # no public source gives the clock of a v2


def test_hours_prices_and_the_deadline():
    v5e = slices.find_slice("v5e-16")
    options = {"steps_left": 7200, "limit": 2.0}
    # 7200 steps of half a second take an hour on 16 chips.
    steps, price = cost.describe(v5e, "us-west4", time=(0.5, "a source"), **options)
    assert "7200 steps of 0.5 s are 1.0 hours and 16 chip-hours" in steps and "a source" in steps
    assert "about 19 USD, at most 38 USD until the deadline in 2 hours: 1.2 USD a chip-hour" in price
    assert "on demand in us-west4 (skypilot-catalog 006059e catalogs/v8/gcp/vms.csv, read 2026-11-27)" in price
    _, price, warning = cost.describe(v5e, "europe-west9", time=(2.0, "a source"), **options)
    assert "in us-central1; your region may differ" in price
    assert warning == (
        "warning: 4.0 hours do not fit --time_limit=2: the run ends after 3600 steps, 3600 steps before its last one"
    )
    steps, price = cost.describe(slices.find_slice("v2-8"), "", time=None, **options)
    assert "no step time is known" in steps and "none is known of a v2" in price


def test_every_price_is_of_a_generation_and_a_region():
    table = cost.prices()
    assert set(table) == {"v3", "v4", "v5e", "v5p", "v6e"} <= set(slices.GENERATIONS)
    for rows in table.values():
        for region, row in rows.items():
            assert re.fullmatch(r"[a-z]+-[a-z]+\d", region) and 0 < float(row.usd) < 10
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.read) and row.source
