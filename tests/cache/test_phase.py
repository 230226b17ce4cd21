"""Which forwards decode, by what a cache was told: each case spelled out."""

from __future__ import annotations

from infinigen_kv.cache.phase import LONGEST_DRAFT, Phase


def after_a_prompt(tokens: int = 8) -> Phase:
    phase = Phase()
    assert not phase.decodes(0, tokens)
    phase.finished(0, tokens)
    return phase


def test_single_tokens_decode_once_a_prompt_was_seen() -> None:
    phase = after_a_prompt()
    assert phase.decodes(8, 1)
    assert not phase.decodes(8, 2), "a later turn"
    assert phase.ends_prompt(8, 1) is None, "nobody said"


def test_a_prompt_fed_token_by_token_is_exact_until_its_end() -> None:
    phase = Phase()
    phase.expect_prompt(3)
    for start, ends in enumerate([False, False, True]):
        assert not phase.decodes(start, 1)
        assert phase.ends_prompt(start, 1) is ends
        phase.finished(start, 1)
    assert phase.decodes(3, 1)
    assert not Phase().decodes(3, 1), "where nobody said how long it is"


def test_drafts_decode_after_the_forward_that_announces_them() -> None:
    phase = after_a_prompt()
    phase.expect_drafts()
    assert not phase.decodes(8, 1)
    phase.finished(8, 4)
    assert phase.decodes(12, LONGEST_DRAFT)
    assert not phase.decodes(12, LONGEST_DRAFT + 1)
    phase.expect_prompt(20)
    phase.finished(12, 8)
    assert not phase.decodes(20, 2), "another prompt ends assisted decoding"


def test_forced_decoding_ends_with_its_block() -> None:
    phase = after_a_prompt()
    with phase.decoding():
        assert phase.decodes(8, 5)
        assert not phase.decodes(0, 5), "a rehearsal has nothing to learn from"
    assert not phase.decodes(8, 5)


def test_a_crop_moves_the_end_of_the_prompt() -> None:
    phase = Phase()
    phase.expect_prompt(8)
    phase.finished(0, 6)
    phase.cropped(4)
    assert phase.decodes(4, 1)
    phase.cropped(0)
    assert not phase.decodes(1, 1), "an empty cache has seen no prompt"


def test_a_reset_phase_is_as_new() -> None:
    phase = after_a_prompt()
    phase.expect_prompt(20)
    phase.expect_drafts()
    phase.reset()
    phase.finished(0, 4)
    assert phase.decodes(4, 1) and phase.ends_prompt(4, 1) is None
    assert not phase.decodes(4, 2)
