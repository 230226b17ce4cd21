"""Perplexity of texts: windows of which the prompt is read in full and the rest with selection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv.session.attach import Session
from infinigen_kv_lab.evals.data import data_file, digest, read_lines, read_utf8
from infinigen_kv_lab.evals.reading import FULL, Reader
from infinigen_kv_lab.evals.task import (
    Costs,
    Inputs,
    Result,
    Sample,
    Task,
    costs,
    fetched,
    fetched_of,
    percent,
)
from infinigen_kv_lab.evals.windows import split_window
from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities
from infinigen_kv_lab.kit.intervals import Array, Estimate, bootstrap, share

CHUNK = 256  # decoded tokens (Figure 12)
ALL_FETCHED = MappingProxyType({"fetched": 1.0, "fetched_all_layers": 1.0})  # also of short texts


@dataclass(frozen=True, slots=True)
class ChunkFigures:
    """Decoded tokens ``start`` to ``end`` of all windows."""

    start: int
    end: int
    ppl: Estimate
    ppl_full: Estimate
    ratio: Estimate
    kl: float


@dataclass(frozen=True, slots=True)
class Perplexity(Result):
    """Figures over all windows, with intervals by bootstrap over windows.

    ``ppl`` and ``ppl_full`` are with the policy and with the full cache, on the same tokens;
    ``ratio`` is the first over the second, paired by window. ``kl`` is KL(full || policy) of the
    next-token distribution in nats, per decoded token; ``top1_same`` how often both have the same
    most likely token. ``gap_growth`` is the last chunk's ratio less the first one's, paired.
    """

    windows: int
    window: int
    prompt_tokens: int
    tokens: int
    ppl: Estimate
    ppl_full: Estimate
    ratio: Estimate
    kl: Estimate
    top1_same: float
    fetched_share: float
    fetched_share_all_layers: float
    costs: Costs
    gap_growth: Estimate
    chunks: tuple[ChunkFigures, ...]

    def headline(self) -> dict[str, str]:
        return {
            "perplexity": str(self.ppl),
            "full": f"{self.ppl_full.value:.4g}",
            "ratio": str(self.ratio),
            "KL": f"{self.kl.value:.4f}",
            "growth": f"{self.gap_growth.value:+.4f}",
            "fetched": percent(self.fetched_share),
            **self.costs.headline(),
        }


class FullRun(NamedTuple):
    """A window read with the full cache: log-probabilities ``(n, V)`` block by block, and what
    `fetched_of` says of it.
    """

    blocks: list[Tensor]
    fetched: Sample


class PerplexityTask(Task):
    """Non-overlapping windows of one text.

    A window's first ``prompt_tokens`` are read in full, each later token selects like a decode
    step. Scored are the tokens that follow those: the first token after the prompt is predicted
    by the prompt itself, and so left out.

    Parameters
    ----------
    ids
        ``(n,)`` token ids.
    settings
        What else identifies the text.
    """

    def __init__(
        self, name: str, ids: Tensor, *, window: int, prompt_tokens: int, source: str
    ) -> None:
        self.name = name
        if not 0 < prompt_tokens < window - 1:
            raise InputError(
                f"prompt_tokens={prompt_tokens} is not valid: it must be at least 1 and leave at "
                f"least two tokens of the window of {window}"
            )
        if ids.numel() < window:
            raise InputError(
                f"task {name!r}: the text has {ids.numel()} tokens, which is no whole window of "
                f"{window}: choose a smaller window"
            )
        self._windows = ids[: ids.numel() // window * window].view(-1, window)
        self._prompt = prompt_tokens
        self._source = source

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "text": self._source,
            "window": self._windows.shape[1],
            "prompt_tokens": self._prompt,
        }

    def __len__(self) -> int:
        return len(self._windows)

    def prepare(self, session: Session, index: int) -> FullRun:
        """The window with the full cache."""
        prompt, decoded = self._split(index)
        reader = Reader(session, FULL)
        reading = reader.start(prompt, room=decoded.numel())
        blocks = [log_probabilities(logits) for logits in reading.blocks(decoded)]
        return FullRun(blocks, {**fetched_of(reader), **ALL_FETCHED})

    def measure(self, reader: Reader, index: int, shared: FullRun) -> Sample:
        prompt, decoded = self._split(index)
        is_full = reader.policy == FULL  # read already, in `prepare`
        targets = decoded[1:].to(shared.blocks[0].device)
        blocks: Iterable[Tensor] = shared.blocks
        if not is_full:
            blocks = reader.start(prompt, room=decoded.numel()).blocks(decoded)
        kl, losses, full_losses, same, at = [], [], [], 0, 0
        for logits, full in zip(blocks, shared.blocks, strict=True):
            ours = log_probabilities(logits)
            kl.append(kl_divergence(full, ours))
            same += int((full.argmax(-1) == ours.argmax(-1)).sum())
            target = targets[at : at + len(ours), None]
            losses.append(-ours[: len(target)].gather(1, target)[:, 0])
            full_losses.append(-full[: len(target)].gather(1, target)[:, 0])
            at += len(ours)
        return {
            "kl": _chunk_sums(kl, decoded.numel()),
            "loss": _chunk_sums(losses, decoded.numel()),
            "loss_full": _chunk_sums(full_losses, decoded.numel()),
            "same": same,
            **(shared.fetched if is_full else fetched_of(reader)),
        }

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Perplexity:
        decoded = self._windows.shape[1] - self._prompt
        edges = [*range(0, decoded, CHUNK), decoded]
        sizes = np.diff(edges)
        targets = sizes.copy()
        targets[-1] -= 1
        losses, full_losses, kl = (
            np.array([each[name] for each in samples], dtype=np.float64)
            for name in ("loss", "loss_full", "kl")
        )  # each (windows, chunks)
        chunks = tuple(
            ChunkFigures(
                start,
                end,
                *_perplexities(losses[:, i], full_losses[:, i], targets[i]),
                kl=float(kl[:, i].sum() / (len(kl) * (end - start))),
            )
            for i, (start, end) in enumerate(pairwise(edges))
            if targets[i] > 0
        )
        ppl, ppl_full, ratio = _perplexities(losses.sum(1), full_losses.sum(1), targets.sum())
        selecting, all_layers = fetched(samples)
        ends = [0, len(chunks) - 1]
        return Perplexity(
            windows=len(samples),
            window=self._windows.shape[1],
            prompt_tokens=self._prompt,
            tokens=len(samples) * int(targets.sum()),
            ppl=ppl,
            ppl_full=ppl_full,
            ratio=ratio,
            kl=share(kl.sum(1).tolist(), [decoded] * len(kl)),
            top1_same=sum(each["same"] for each in samples) / (len(samples) * decoded),
            fetched_share=selecting,
            fetched_share_all_layers=all_layers,
            costs=costs(samples),
            gap_growth=_growth(losses[:, ends], full_losses[:, ends], targets[ends]),
            chunks=chunks,
        )

    def _split(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._windows[index]
        return window[: self._prompt], window[self._prompt :]


def wikitext2(name: str, inputs: Inputs) -> PerplexityTask:
    """WikiText-2: the rows of the raw test split, joined by two newlines (as in the paper)."""
    path = data_file(
        inputs.data,
        "wikitext2/wiki.test.raw",
        task=name,
        what="the test split of wikitext-2-raw-v1 (one file, wiki.test.raw)",
    )
    rows = [f"{line}\n" if line.strip() else "" for line in read_lines(path)]
    return _task(name, "\n\n".join(rows), inputs)


def penn_treebank(name: str, inputs: Inputs) -> PerplexityTask:
    """Penn Treebank: the stripped lines of the validation split, joined by two newlines."""
    path = data_file(
        inputs.data,
        "ptb/ptb.valid.txt",
        task=name,
        what="the validation split of the word-level Penn Treebank (ptb.valid.txt)",
    )
    return _task(name, "\n\n".join(line.strip() for line in read_lines(path)), inputs)


def own_text(name: str, inputs: Inputs) -> PerplexityTask:
    """The user's own text, as it is."""
    if inputs.options.text is None:
        raise InputError(f"task {name!r} needs a text: name a UTF-8 file with --text FILE")
    return _task(name, read_utf8(inputs.options.text), inputs)


def _task(name: str, text: str, inputs: Inputs) -> PerplexityTask:
    window, prompt = split_window(inputs)
    ids = torch.tensor(inputs.tokenizer(text, verbose=False)["input_ids"])
    return PerplexityTask(name, ids, window=window, prompt_tokens=prompt, source=digest(text))


def _chunk_sums(blocks: list[Tensor], decoded: int) -> list[float]:
    """Sums over chunks of per-token values in blocks, short of ``decoded`` by one at most."""
    values = torch.cat(blocks).double()
    padded = torch.nn.functional.pad(values, (0, decoded - len(values)))
    return [chunk.sum().item() for chunk in padded.split(CHUNK)]


def _perplexities(
    losses: Array, full_losses: Array, targets: float
) -> tuple[Estimate, Estimate, Estimate]:
    """Perplexity, that of the full cache, and their ratio, from summed losses ``(windows,)``."""
    rows = np.stack([losses, full_losses, np.full(len(losses), targets)], axis=1).tolist()
    return (
        bootstrap(rows, lambda sums: np.exp(sums[..., 0] / sums[..., 2])),
        bootstrap(rows, lambda sums: np.exp(sums[..., 1] / sums[..., 2])),
        bootstrap(rows, lambda sums: np.exp((sums[..., 0] - sums[..., 1]) / sums[..., 2])),
    )


def _growth(losses: Array, full_losses: Array, targets: Array) -> Estimate:
    """Ratio in the second column less that in the first; ``(windows, 2)`` losses."""
    gaps = (losses - full_losses) / targets
    rows = np.concatenate([gaps, np.ones((len(gaps), 1))], axis=1).tolist()

    def growth(sums: Array) -> Array:
        first, last, windows = sums[..., 0], sums[..., 1], sums[..., 2]
        return np.exp(last / windows) - np.exp(first / windows)

    return bootstrap(rows, growth)
