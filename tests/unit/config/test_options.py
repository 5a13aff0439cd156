"""Knobs: every name known, every value parsed, nothing ignored."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from mpistrat import config
from mpistrat.errors import OptionError


def test_an_empty_environment_gives_the_defaults():
    assert config.read_options({}) == config.Options()
    assert config.read_options({"PATH": "x", "mpistrat_numba": "0"}) == config.Options()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0", False), ("1", True), ("off", False), ("ON", True), (" true ", True), ("False", False)],
)
def test_flags(text, wanted):
    assert config.read_options({"MPISTRAT_NUMBA": text}).numba is wanted


@pytest.mark.parametrize("text", ["", "2", "yes!", "no"])
def test_a_value_that_does_not_parse_is_named(text):
    with pytest.raises(OptionError, match="MPISTRAT_NUMBA"):
        config.read_options({"MPISTRAT_NUMBA": text})


def test_an_unknown_name_is_an_error_with_a_guess():
    with pytest.raises(ValueError, match="Did you mean MPISTRAT_NUMBA"):
        config.read_options({"MPISTRAT_NUMBAA": "1"})


def test_every_field_has_a_name_in_the_environment():
    texts = {"record", "measure", "profile"}  # files and directories may have any name
    for field in dataclasses.fields(config.Options):
        if field.name in texts:
            assert (
                getattr(config.read_options({f"MPISTRAT_{field.name.upper()}": "?!"}), field.name)
                == "?!"
            )
            continue
        with pytest.raises(OptionError, match=f"MPISTRAT_{field.name.upper()}"):
            config.read_options({f"MPISTRAT_{field.name.upper()}": "?!"})


@pytest.mark.parametrize("name", ["WARN", "TIMEOUT", "GRACE"])
@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_are_positive_numbers(name, text):
    with pytest.raises(OptionError, match=rf"MPISTRAT_{name}='{text}' .* seconds, more than 0"):
        config.read_options({f"MPISTRAT_{name}": text})


def test_no_more_seconds_than_clocks_can_count():
    timeout = config.read_options({"MPISTRAT_TIMEOUT": "1e300"}).timeout
    assert 1e9 <= timeout < threading.TIMEOUT_MAX


@pytest.mark.parametrize("text", ["-1", "1.5", "", "all", "inf", str(1 << 63)])
def test_a_number_of_threads_is_0_or_more(text):
    assert config.read_options({"MPISTRAT_THREADS": "3"}).threads == 3
    assert config.read_options({"MPISTRAT_THREADS": "0"}).threads == 0
    with pytest.raises(OptionError, match=f"MPISTRAT_THREADS='{text}' .* a number of threads"):
        config.read_options({"MPISTRAT_THREADS": text})


@pytest.mark.parametrize("text", ["-1", "1.5", "", "all", str(1 << 63)])
def test_threads_of_blas_are_a_number_or_stay(text):
    assert config.read_options({}).blas_threads == 0
    assert config.read_options({"MPISTRAT_BLAS_THREADS": "3"}).blas_threads == 3
    assert (
        config.read_options({"MPISTRAT_BLAS_THREADS": "keep"}).blas_threads == config.KEEP_THREADS
    )
    with pytest.raises(OptionError, match=f"MPISTRAT_BLAS_THREADS='{text}' .* keep"):
        config.read_options({"MPISTRAT_BLAS_THREADS": text})


def test_a_number_of_ranks_is_not_negative():
    assert config.read_options({"MPISTRAT_RANKS": "4"}).ranks == 4
    assert config.read_options({"MPISTRAT_RANKS": ""}).ranks == config.read_options({}).ranks == 0
    with pytest.raises(OptionError, match="MPISTRAT_RANKS"):
        config.read_options({"MPISTRAT_RANKS": "-4"})


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("MPISTRAT_NUMBA", "0")
    assert config.read_options().numba is False
