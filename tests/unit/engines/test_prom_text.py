"""Prometheus text: the wanted names, in any of their spellings; nothing from anything else."""

from __future__ import annotations

import math
import time

import pytest

from gateway.engines.base import Answer
from gateway.engines.prom_text import (
    exposition,
    labels,
    mean,
    ratio,
    series,
    total,
    whole,
)
from tests.unit.engines.talk import sample


def test_series_of_several_engines_are_added_up() -> None:
    text = b'run{engine="0",model_name="m"} 3.0\nrun{engine="1",model_name="m"} 4.0\n'

    assert total(text, "run") == 7.0
    assert mean(text, "run") == 3.5


def test_the_first_alias_that_is_there_counts() -> None:
    text = b"old 1\nnew 2\n"

    assert total(text, "new", "old") == 2.0
    assert total(text, "newest", "old") == 1.0
    assert total(text, "other") is None


def test_a_longer_name_and_a_comment_are_not_the_name() -> None:
    text = b"# TYPE run gauge\nrun_total 9\nrun_created 1e9\nxrun 5\nrun 2\n"

    assert total(text, "run") == 2.0


def test_a_name_at_the_very_start_and_one_with_a_time_stamp_are_found() -> None:
    assert total(b"run 2 1795971000000\n", "run") == 2.0
    assert total(b"run\t3\r\n", "run") == 3.0
    assert total(b"run_total 1\nrun 2\n", "run") == 2.0


def test_braces_quotes_and_spaces_in_labels_do_not_confuse() -> None:
    text = rb'run{a="x} 9",b="say \"hi\" {",c=""} 4' + b"\n"

    assert series(text, "run") == [(rb'a="x} 9",b="say \"hi\" {",c=""', 4.0)]
    assert labels(series(text, "run")[0][0]) == {"a": "x} 9", "b": r"say \"hi\" {", "c": ""}


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"many"])
def test_a_sum_with_a_figure_that_is_none_is_not_said(value: bytes) -> None:
    assert total(b'run{e="0"} 1\nrun{e="1"} ' + value + b"\n", "run") is None


def test_half_a_last_line_is_not_read_as_a_smaller_number() -> None:
    assert total(b"wait 1\nrun 1", "run") is None
    assert total(b'run{engine="0', "run") is None


def test_only_the_wanted_rank_counts_where_there_are_ranks() -> None:
    text = b'run{tp_rank="0"} 3\nrun{tp_rank="1"} 3\n'

    assert total(text, "run", where=b'tp_rank="0"') == 3.0
    assert total(b"run 3\n", "run", where=b'tp_rank="0"') == 3.0


def test_html_is_no_metric() -> None:
    assert total(b"<html><body>run 3</body></html>", "run") is None


def test_a_count_or_ratio_beyond_what_is_plausible_is_not_said() -> None:
    assert whole(1e30) is None
    assert whole(None) is None
    assert whole(5.0) == 5
    assert ratio(1.005) == 1.0
    assert ratio(55.0) is None
    assert ratio(None) is None


def test_the_text_of_a_failed_or_overlong_answer_is_not_used() -> None:
    assert exposition(None) == b""
    assert exposition(Answer(501, {}, b"run 1\n")) == b""
    assert exposition(Answer(200, {}, b"run 1\n", cut=True)) == b""


def test_the_number_of_series_is_bounded_and_part_of_a_sum_is_not_said() -> None:
    text = b"".join(b'run{e="%d"} 1\n' % i for i in range(5000))

    assert len(series(text, "run")) == 4096
    assert total(text, "run") is None


def test_a_line_of_open_quotes_costs_no_more_than_its_length() -> None:
    text = b"run{" + b'a="' * 300_000 + b"\n"
    began = time.process_time()

    assert total(text, "run") is None
    assert time.process_time() - began < 1.0


def test_four_mebibytes_of_histograms_do_not_hold_the_loop() -> None:
    text = sample("vllm/metrics_busy.txt").body * 66
    began = time.process_time()

    total(text, "vllm:not_there", "vllm:neither")

    assert len(text) > 4 << 20
    assert time.process_time() - began < 0.5


def test_a_value_that_is_no_number_is_nan() -> None:
    assert math.isnan(series(b"run x\n", "run")[0][1])
