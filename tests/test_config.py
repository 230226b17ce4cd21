"""Every field of the configuration, with good and bad values."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from infinigen_kv.config import INDEX_BITS, OWN_DEFAULTS, InfiniGenConfig
from infinigen_kv.errors import InputError

NAN, INFINITY = float("nan"), float("inf")
REALS: dict[str, tuple[list[Any], str]] = {
    "alpha": ([-1e-9, -1], "a finite number >= 0"),
    "partial_ratio": ([0, 0.0, -0.1, 1.0001, 2], "a number in (0, 1]"),
    "max_fetch": ([0, 0.0, -0.1, 1.0001, 2, None], "a number in (0, 1]"),
}
INTEGERS = {
    "first_layer": 1,
    "recent_tokens": 0,
    "sink_tokens": 0,
    "min_context": 1,
    "refit_every": 0,
}
BAD: list[tuple[str, Any, str]] = [
    *(
        (name, value, allowed)
        for name, (values, allowed) in REALS.items()
        for value in (*values, NAN, INFINITY, -INFINITY, 10**400, True, False, "0.5", {0.5}, 1j)
    ),
    *(("partial_ratio", value, "a number in (0, 1]") for value in ([0.5], (0.5,))),
    *(
        ("alpha", value, "finite numbers >= 0, one for each layer")
        for value in ((), [], (1.0, -1.0), [4, NAN], (INFINITY,), ("4", 5), [[1]])
    ),
    *(
        (name, value, f"an integer >= {least}")
        for name, least in INTEGERS.items()
        for value in (least - 1, -5, 1.0, NAN, INFINITY, True, "3", [3])
    ),
    ("first_layer", None, "an integer >= 1"),
    ("min_context", None, "an integer >= 1"),
    *(
        ("rehearsal", value, "one of 'calibrated', 'paper'")
        for value in ("Paper", "", "oracle", None, 1, True, NAN, ["paper"])
    ),
    *(("tail", value, "True or False") for value in (0, 1, 1.0, "yes", [True], NAN)),
    *(
        ("index_bits", value, INDEX_BITS)
        for value in (
            "",
            "4",
            "x",
            "4x",
            "x4",
            "4x0",
            "1x4",
            "5x4",
            "8x16",
            "2x16+3x32",
            "4x8+4x8",
            "4x8+",
            "+4x8",
            "4x8,2x8",
            "4 x 8",
            "4x8 ",
            "4x-8",
            "4x08",
            "4x8.0",
            "4x123456",
            "\u0664x8",
            4,
            4.0,
            True,
            NAN,
            ("4x8",),
            ["4x8"],
            b"4x8",
            (4, 8),
        )
    ),
]
GOOD: list[tuple[str, Any]] = [
    ("alpha", 0), ("alpha", 0.0), ("alpha", 7), ("alpha", 1e9),
    ("alpha", (0, 4.5)), ("alpha", (1e9,)),
    ("partial_ratio", 1e-3), ("partial_ratio", 1), ("partial_ratio", 1.0),
    ("max_fetch", 1e-3), ("max_fetch", 1), ("max_fetch", 1.0),
    ("first_layer", 1), ("first_layer", 99),
    ("recent_tokens", 0), ("recent_tokens", 10_000),
    ("sink_tokens", 0), ("sink_tokens", 4),
    ("min_context", 1), ("min_context", 100_000),
    ("rehearsal", "paper"), ("rehearsal", "calibrated"),
    ("tail", True), ("tail", False), ("refit_every", 0), ("refit_every", 10_000),
    ("index_bits", "2x1"), ("index_bits", "4x64"), ("index_bits", "4x16+3x16+2x32"),
    ("index_bits", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_value_is_named_with_its_field_and_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    message = f"{name}={value!r} is not valid: it must be {allowed}"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        InfiniGenConfig(**{name: value})
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        InfiniGenConfig.from_dict({name: value})


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_values_at_the_edges_of_the_range_are_kept(name: str, value: Any) -> None:
    assert getattr(InfiniGenConfig(**{name: value}), name) == value
    assert InfiniGenConfig.from_dict({name: value}) == InfiniGenConfig(**{name: value})


def test_the_tail_needs_scores_of_absolute_height() -> None:
    assert InfiniGenConfig().tail
    assert not InfiniGenConfig(rehearsal="paper").tail
    with pytest.raises(InputError, match="tail=True is not valid with rehearsal='paper'"):
        InfiniGenConfig(rehearsal="paper", tail=True)


def test_only_the_calibrated_rehearsal_is_fitted_anew() -> None:
    assert InfiniGenConfig().refit_every == 256
    assert InfiniGenConfig(rehearsal="paper").refit_every == 0
    message = "refit_every=64 is not valid with rehearsal='paper'"
    with pytest.raises(InputError, match=message):
        InfiniGenConfig(rehearsal="paper", refit_every=64)


def test_few_bits_say_how_many_dimensions() -> None:
    config = InfiniGenConfig(index_bits="4x2+3x16+2x32")
    assert config.partial_dim(64) == 50 and config.partial_ratio is None
    assert config.index_widths == ((4, 2), (3, 16), (2, 32))
    assert InfiniGenConfig().index_widths == ()
    assert dataclasses.replace(config, alpha=1.0).index_bits == config.index_bits
    message = "index_bits='4x2+3x16+2x32' is not valid for this model: it has 50 dimensions, and"
    with pytest.raises(InputError, match=re.escape(message)):
        config.partial_dim(48)
    message = "index_bits='4x8' says how many .*, and so does partial_ratio=0.5: leave one of them"
    with pytest.raises(InputError, match=message):
        InfiniGenConfig(index_bits="4x8", partial_ratio=0.5)
    with pytest.raises(InputError, match="index_bits='4x8' is not valid with rehearsal='paper'"):
        InfiniGenConfig(index_bits="4x8", rehearsal="paper")


def test_every_field_is_covered_here() -> None:
    names = {field.name for field in dataclasses.fields(InfiniGenConfig)}
    assert {name for name, *_ in BAD} == names
    assert {name for name, _ in GOOD} == names


def test_the_documented_defaults() -> None:
    config = InfiniGenConfig()
    assert config.rehearsal == "calibrated"
    assert config.max_fetch == 0.2
    assert config.recent_tokens == 32
    assert config.first_layer == 1
    paper = InfiniGenConfig(rehearsal="paper")
    assert (paper.partial_ratio, paper.recent_tokens, paper.sink_tokens) == (0.3, 0, 0)


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("name", ["alpha", "partial_ratio", "recent_tokens", "sink_tokens"])
def test_none_stands_for_the_rehearsals_own_value(rehearsal: str, name: str) -> None:
    own = OWN_DEFAULTS[rehearsal]
    absent = InfiniGenConfig.from_dict({"rehearsal": rehearsal})
    explicit = InfiniGenConfig.from_dict({"rehearsal": rehearsal, name: None})
    assert absent == explicit
    assert getattr(absent, name) == own[name]
    changed = InfiniGenConfig.from_dict({"rehearsal": rehearsal, name: 1})
    assert getattr(changed, name) == 1
    assert all(getattr(changed, other) == own[other] for other in own if other != name)


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        InfiniGenConfig.from_dict({"alpha": 4.0, "ratio": 0.3})
    message = str(caught.value)
    assert "unknown setting 'ratio'" in message
    for field in dataclasses.fields(InfiniGenConfig):
        assert field.name in message
    with pytest.raises(TypeError):
        InfiniGenConfig(ratio=0.3)  # type: ignore[call-arg]


def test_it_survives_a_round_trip_through_plain_values() -> None:
    config = InfiniGenConfig(rehearsal="paper", alpha=3.5, first_layer=2)
    assert InfiniGenConfig.from_dict(dataclasses.asdict(config)) == config


def test_alpha_by_layer() -> None:
    assert [InfiniGenConfig(alpha=3).alpha_of(layer) for layer in (0, 99)] == [3, 3]
    config = InfiniGenConfig.from_dict({"alpha": [1, 2.5]})
    assert config.alpha == (1, 2.5) and hash(config) == hash(InfiniGenConfig(alpha=(1, 2.5)))
    assert [config.alpha_of(layer) for layer in (0, 1)] == [1, 2.5]
    with pytest.raises(InputError, match="alpha has 2 values, and the model has a layer 2"):
        config.alpha_of(2)


def test_it_is_frozen() -> None:
    config = InfiniGenConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.alpha = 3.0  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        config.other = 3.0  # type: ignore[attr-defined]


def test_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="alpha"):
        InfiniGenConfig(alpha=NAN)


@pytest.mark.parametrize(
    ("ratio", "head_dim", "rank"),
    [(0.3, 64, 19), (0.375, 64, 24), (1.0, 64, 64), (0.001, 64, 1), (0.3, 128, 38), (1, 7, 7)],
)
def test_partial_dim_is_the_nearest_rank_and_at_least_1(
    ratio: float, head_dim: int, rank: int
) -> None:
    assert InfiniGenConfig(partial_ratio=ratio).partial_dim(head_dim) == rank
