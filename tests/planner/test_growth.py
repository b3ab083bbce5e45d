"""Growth page arithmetic: orders of growth, and sizes at which two axes send equal bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.facts.validation import SpecError
from planner.traffic_growth import (
    RANGES,
    Setting,
    compare_axes,
    compute_curves,
    compute_data_bytes,
    compute_pipeline_bytes,
    compute_tensor_bytes,
    compute_zero3_bytes,
    get_dp_pp_tokens,
    get_tp_dp_tokens,
    parse_setting,
)

some = st.builds(
    Setting,
    b=st.integers(1, 4096),
    s=st.integers(64, 131072),
    h=st.integers(128, 65536),
    l=st.integers(8, 1024),
    k=st.integers(1, 8),
    n=st.integers(2, 65536),
)
repeatable = settings(derandomize=True, deadline=None)


def test_figures_match_hand_computed_values() -> None:
    x = Setting(b=8, s=2048, h=4096, l=32, k=8, n=8)
    assert compute_data_bytes(x) == 2 * 7 / 8 * 12 * 32 * 4096 * 4096 * 2
    assert compute_tensor_bytes(x) == 8 * 7 / 8 * 8 * 2048 * 4096 * 32 * 2
    assert compute_pipeline_bytes(x) == 2 * 3 * 8 * 2048 * 4096 * 2
    assert compare_axes(x)["order"] == "TP > DP > PP"


@repeatable
@given(some)
def test_axis_traffic_grows_by_its_stated_order(x: Setting) -> None:
    twice = {name: x._replace(**{name: 2 * getattr(x, name)}) for name in ("b", "s", "h", "l")}
    assert compute_data_bytes(twice["b"]) == compute_data_bytes(twice["s"]) == compute_data_bytes(x)
    assert compute_data_bytes(twice["h"]) == pytest.approx(4 * compute_data_bytes(x))
    assert (
        compute_tensor_bytes(twice["b"])
        == compute_tensor_bytes(twice["h"])
        == pytest.approx(2 * compute_tensor_bytes(x))
    )
    assert compute_pipeline_bytes(twice["s"]) == pytest.approx(2 * compute_pipeline_bytes(x))
    assert compute_zero3_bytes(x) == pytest.approx(1.5 * compute_data_bytes(x))


@repeatable
@given(some)
def test_axes_send_equal_bytes_at_their_crossing(x: Setting) -> None:
    meeting = get_tp_dp_tokens(x)
    assert compute_tensor_bytes(x._replace(b=1, s=round(meeting))) == pytest.approx(compute_data_bytes(x), rel=1e-6)
    high = get_dp_pp_tokens(x)
    assert (high is None) == (x.l <= x.k)
    if high is not None:
        per_token = compute_pipeline_bytes(x) / (x.b * x.s)
        assert per_token * high == pytest.approx(compute_data_bytes(x), rel=1e-9)


@repeatable
@given(some)
def test_verdict_matches_the_numbers(x: Setting) -> None:
    told = compare_axes(x)
    assert told["classic"] == (compute_tensor_bytes(x) > compute_data_bytes(x) > compute_pipeline_bytes(x))
    assert told["verdict"].startswith("TP > DP > PP holds") == told["classic"]
    sizes = [v["num_bytes"] for v in told["volumes"]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("variable", RANGES)
def test_curves_pass_through_the_current_point(variable: str) -> None:
    x = Setting()
    grown = compute_curves(x, variable)
    assert grown["x"] == sorted(grown["x"])
    for at, size in zip(grown["x"], grown["series"]["tp"], strict=True):
        assert size == compute_tensor_bytes(x._replace(**{variable: int(at)}))


@pytest.mark.parametrize(
    ("values", "field"),
    [({"b": 0}, "b"), ({"h": "wide"}, "h"), ({"q": 1}, "q"), ({"k": 64, "l": 32}, "k"), ({"n": True}, "n")],
)
def test_invalid_values_are_rejected_by_name(values: dict[str, object], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_setting(values)
    assert [p.field for p in caught.value.problems] == [field]


def test_unknown_variable_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"`over` is 'q'. Use one of b, s, h, l, k, n\."):
        compute_curves(Setting(), "q")


def test_axes_with_equal_traffic_are_reported_as_equal() -> None:
    told = compare_axes(Setting(b=6, s=2048, h=4096))
    assert told["order"] == "TP = DP > PP"
    assert not told["classic"]
    assert told["verdict"].startswith("TP = DP")


def test_boundary_sizes_are_whole() -> None:
    assert (
        compute_pipeline_bytes(Setting(l=32, k=20))
        == compute_pipeline_bytes(Setting(l=32, k=16))
        == 2 * 8 * 2048 * 4096 * 2
    )


def test_curves_include_the_current_setting() -> None:
    """The legend without a cursor then shows the values of the table."""
    assert 11.0 in compute_curves(Setting(b=11), "b")["x"]
