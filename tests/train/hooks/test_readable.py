import signal

import pytest

from jtrain.io.formatting import format_count, format_duration, format_number, signal_name


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (2.14321, "2.1432"),
        (0.0, "0.0000"),
        (-10.5, "-10.5000"),
        (1.31e-5, "1.310e-05"),
        (2.5e6, "2.500e+06"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_number_has_its_significant_digits(x, text):
    assert format_number(x) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0.00"),
        (7.254, "7.25"),
        (9.996, "10.0"),
        (99.96, "100"),
        (813.2, "813"),
        (999.7, "1.00k"),
        (52_123, "52.1k"),
        (1_250_000, "1.25M"),
        (3e15, "3000T"),
    ],
)
def test_a_count_has_three_digits(x, text):
    assert format_count(x) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0:00"), (59.6, "1:00"), (725, "12:05"), (11525, "3:12:05"), (184_320, "2d 03:12")],
)
def test_a_duration_reads_as_on_a_clock(seconds, text):
    assert format_duration(seconds) == text


def test_a_signal_without_a_name_has_its_number():
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 6) == f"signal {signal.SIGRTMIN + 6}"
