"""Configuration arguments are converted to their types, or refused by one line that names the argument."""

import dataclasses
import typing

import pytest

from axial.errors import InputError
from axial.io import check


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Config(check.Checked):
    steps: check.Count = 1
    rate: check.Positive = 1.0
    size: check.Size = (1, 1)
    norm: typing.Literal["batch", "group"] = "batch"
    inner: Inner = Inner()
    other: Inner | None = None
    scales: tuple[float, float] = (0.5, 2.0)


def test_arguments_are_converted_to_their_annotated_types():
    config = Config(3, rate=2, size=[5, 7], norm="group", inner=Inner(2), other=Inner(3))
    assert config == Config(3, 2.0, (5, 7), norm="group", inner=Inner(2), other=Inner(3))
    assert isinstance(config.rate, float) and isinstance(config.size, tuple)
    assert Config(other=None).other is None


@pytest.mark.parametrize(
    "arguments, line",
    [
        ({"steps": 0}, "Config.steps = 0: expected int >= 1"),
        ({"steps": True}, "Config.steps = True: expected int, got bool"),
        ({"steps": None}, "Config.steps = None: expected int, got null"),
        ({"size": 5}, "Config.size = 5: expected a list, got int"),
        ({"size": (5, "x")}, "Config.size = (5, 'x'): [1]: expected int, got str"),
        ({"size": (5, 0)}, "Config.size = (5, 0): [1]: expected int >= 1"),
        ({"size": (0, 5)}, "Config.size = (0, 5): [0]: expected int >= 1"),
        ({"norm": "grup"}, "Config.norm = 'grup': expected one of batch, group (did you mean 'group'?)"),
        ({"inner": 1}, "Config.inner = 1: expected @Inner()"),
        ({"other": 1}, "Config.other = 1: expected a Inner, or None for the data's own"),
    ],
)
def test_a_refusal_names_the_argument(arguments, line):
    with pytest.raises(InputError) as error:
        Config(**arguments)
    assert str(error.value) == line


def test_a_long_value_is_cut():
    with pytest.raises(InputError, match=f"^Config.steps = '{'x' * 199}[.]{{3}}: expected int, got str$"):
        Config(steps="x" * 1000)
    assert check.shortened("x" * 198) == repr("x" * 198)
    assert check.shortened("x" * 199) == f"'{'x' * 199}..."


def test_a_choice_and_a_range_of_two():
    check.check_choice("--split", "val", ["train", "val"])
    with pytest.raises(InputError, match=r"--split must be one of train, val: got 'vol'"):
        check.check_choice("--split", "vol", ["train", "val"])
    check.check_range("Config.scales", (2.0, 2.0))
    with pytest.raises(InputError, match=r"Config.scales = \(3.0, 2.0\): expected \(smallest, largest\)"):
        check.check_range("Config.scales", (3.0, 2.0))


def test_sizes_of_pixels():
    for text, expected in {
        "0.65um": (0.65, "um"),
        ".5 \u00b5m": (0.5, "um"),
        "1e-3\u03bcm": (0.001, "um"),
        "12nm": (12, "nm"),
        "3.mm": (3, "mm"),
        "2Zoll": (2, "Zoll"),
    }.items():
        assert check.convert_pixel_size("pixel_size", text) == expected
    wrong = "", "0.65", "um", "0um", "-1um", "nanum", "infmm", "1e99um", "1px", "2 Pixels", "1um2", "1u_m", "1 um ", 3
    for text in wrong:
        with pytest.raises(InputError, match=f"^size={text}: expected the side of a pixel and its unit, as in 0.65um$"):
            check.convert_pixel_size("size", text)
