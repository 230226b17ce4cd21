"""What all accuracy figures of a run have in common, and how much of it they measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.task import TaskOptions
from infinigen_kv_lab.figures.accuracy.evaluation import Evaluation

COMPARED = (FULL, "infinigen", "infinigen-paper", "h2o")
TEXT = "wikitext2"
SHARE = 0.1  # of the cached tokens for h2o, where it does not vary: about what infinigen fetches
EVERYTHING = 1e3  # an alpha within which all tokens are: then max_fetch alone says how many
SHORTEST = 256  # tokens of a window, below which a figure would show nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Windows of a text: tokens of each, of its prompt, and how many windows."""

    window: int
    prompt_tokens: int
    windows: int

    def within(self, tokens: int) -> Span:
        """No longer than ``tokens``, with the same share of them in the prompt."""
        if self.window <= tokens:
            return self
        prompt = self.prompt_tokens * tokens // self.window
        return replace(self, window=tokens, prompt_tokens=prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyScale:
    """How much is measured: all of it, or what two cores do in about ten minutes.

    Parameters
    ----------
    text
        What perplexities are measured on (Figure 12).
    sweep
        The same, where settings vary (Figures 13 and 19).
    stepwise
        The same, where tokens have to be fed one at a time (Table 2, codecs).
    course
        The same, for the attention step by step (Figure 4).
    looks
        Windows of ``text`` in which the model itself is looked at (Table 1, Figures 5, 7, 20).
    texts
        Tasks of Figure 12.
    lengths, length_tokens
        Figure 19: prompts of a perplexity at a fixed number of tokens, and the tokens after them.
    contexts
        Of Figure 20.
    shares
        Of the cached tokens, where a perplexity's vary.
    task_shares, task_alphas
        Budgets of h2o, and alphas of InfiniGen, on the few-shot tasks.
    capacities
        Of Table 2.
    passkeys
        Prompts at most; None for all that fit the model.
    needle_lengths, needle_repeats
        Contexts with needles.
    documents
        Of each few-shot task.
    shots
        Solved examples before each question.
    """

    text: Span
    sweep: Span
    stepwise: Span
    course: Span
    looks: int
    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    length_tokens: int
    contexts: tuple[int, ...]
    shares: tuple[float, ...]
    task_shares: tuple[float, ...]
    task_alphas: tuple[float, ...]
    capacities: tuple[float, ...]
    passkeys: int | None
    needle_lengths: tuple[int, ...]
    needle_repeats: int
    documents: int
    shots: int

    def with_windows(self, windows: int | None) -> AccuracyScale:
        """So many windows of every text, in place of the scale's own."""
        if windows is None:
            return self
        spans = {
            name: replace(getattr(self, name), windows=windows)
            for name in ("text", "sweep", "stepwise", "course")
        }
        return replace(self, looks=windows, **spans)

    def within(self, positions: int | None) -> AccuracyScale:
        """What a model with so many positions can read.

        Raises
        ------
        InputError
            If nothing of use fits.
        """
        if positions is None:
            return self
        if positions < SHORTEST:
            raise InputError(
                f"the model's {positions} positions are too few for these figures: they need at "
                f"least {SHORTEST}"
            )
        questions = 64  # tokens that are asked after a context with needles, about twice over
        prompts = positions - self.length_tokens
        return replace(
            self,
            text=self.text.within(positions),
            sweep=self.sweep.within(positions),
            stepwise=self.stepwise.within(positions),
            course=self.course.within(positions),
            lengths=_cut(self.lengths, prompts) if prompts >= SHORTEST // 2 else (positions // 2,),
            length_tokens=min(self.length_tokens, positions // 2),
            contexts=_cut(self.contexts, positions),
            needle_lengths=_cut(self.needle_lengths, max(128, positions - 4 * questions)),
        )


def _cut(lengths: tuple[int, ...], longest: int) -> tuple[int, ...]:
    """Those that fit; the longest that does in place of those that do not."""
    return tuple(sorted({min(each, longest) for each in lengths}))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySetting:
    """What all evaluations of a run have in common.

    Parameters
    ----------
    scale
        How much is measured, already cut to what the model can read.
    model
        The model's name.
    text
        A file to read instead of WikiText-2, where a figure needs any text.
    """

    scale: AccuracyScale
    model: str
    text: Path | None = None

    def reading(self, task: str, policies: Sequence[str], span: Span, **changes: Any) -> Evaluation:
        """An evaluation on windows of a text."""
        options = TaskOptions(window=span.window, prompt_tokens=span.prompt_tokens, text=self.text)
        return evaluation(task, policies, options, span.windows, **changes)

    def at_share(self, policy: str, share: float, span: Span, *, skewed: bool = True) -> Evaluation:
        """Perplexity where a policy attends to a share of the cached tokens.

        InfiniGen's own policies have no threshold then, h2o a budget.
        """
        if policy == "h2o":
            return self.reading(TEXT, (policy,), span, budget=share)
        settings = settings_at(policy, share)
        return self.reading(TEXT, (policy,), span, settings=settings, skewed=skewed)

    def look(self, task: str, *policies: str) -> Evaluation:
        """A few windows of the length that perplexities are measured on."""
        span = replace(self.scale.text, windows=self.scale.looks)
        return self.reading(task, policies or (FULL,), span)

    def look_at_contexts(self) -> Evaluation:
        """The attention at several context lengths (`evals.sparsity`), which no policy changes."""
        options = TaskOptions(lengths=self.scale.contexts, text=self.text)
        return evaluation("sparsity", (FULL,), options, self.scale.looks)

    def few_shot(self, task: str, policy: str, **changes: Any) -> Evaluation:
        """Documents of a few-shot task."""
        options = TaskOptions(shots=self.scale.shots)
        return evaluation(task, (policy,), options, self.scale.documents, **changes)


def evaluation(
    task: str,
    policies: Sequence[str],
    options: TaskOptions,
    samples: int | None,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Evaluation:
    """Any evaluation; ``settings`` are fields of `InfiniGenConfig`."""
    return Evaluation(
        task=task,
        policies=tuple(policies),
        options=options,
        samples=samples,
        settings=tuple(settings.items()),
        **changes,
    )


def settings_at(policy: str, share: float) -> dict[str, Any]:
    """Settings of the selection with which InfiniGen's policies attend to just that share."""
    own: dict[str, Any] = {"alpha": EVERYTHING, "max_fetch": share}
    return {"rehearsal": "paper", **own} if policy == "infinigen-paper" else own


FULL_SCALE = AccuracyScale(
    text=Span(window=3072, prompt_tokens=2048, windows=8),
    sweep=Span(window=3072, prompt_tokens=2048, windows=4),
    stepwise=Span(window=2304, prompt_tokens=2048, windows=4),
    course=Span(window=2560, prompt_tokens=2048, windows=4),
    looks=4,
    texts=("wikitext2", "ptb"),
    lengths=(512, 1024, 2048, 4096, 7680),
    length_tokens=512,
    contexts=(512, 1024, 2048, 4096, 8192),
    shares=(0.02, 0.05, 0.1, 0.2, 0.4),
    task_shares=(0.05, 0.1, 0.2),
    task_alphas=(2.0, 4.25, 7.0),
    capacities=(1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1),
    passkeys=None,
    needle_lengths=(1024, 2048, 4096),
    needle_repeats=5,
    documents=200,
    shots=5,
)
QUICK_SCALE = AccuracyScale(
    text=Span(window=1280, prompt_tokens=768, windows=2),
    sweep=Span(window=640, prompt_tokens=512, windows=2),
    stepwise=Span(window=576, prompt_tokens=512, windows=1),
    course=Span(window=768, prompt_tokens=512, windows=1),
    looks=2,
    texts=("wikitext2",),
    lengths=(512, 1024),
    length_tokens=64,
    contexts=(256, 512, 1024, 2048),
    shares=(0.05, 0.1, 0.2),
    task_shares=(0.1,),
    task_alphas=(4.25,),
    capacities=(1.0, 0.8, 0.4),
    passkeys=5,
    needle_lengths=(512, 1024),
    needle_repeats=1,
    documents=4,
    shots=3,
)
