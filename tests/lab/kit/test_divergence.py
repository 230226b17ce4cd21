"""KL against its definition written out."""

from __future__ import annotations

import math

import torch

from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities


def test_against_the_definition() -> None:
    full, selected = torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([[0.5, 1.5, 0.0]])
    p = [math.exp(x) / sum(map(math.exp, (2, 1, -1))) for x in (2, 1, -1)]
    q = [math.exp(x) / sum(map(math.exp, (0.5, 1.5, 0))) for x in (0.5, 1.5, 0)]
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = kl_divergence(log_probabilities(full), log_probabilities(selected))
    torch.testing.assert_close(found, torch.tensor([expected]))
    assert kl_divergence(log_probabilities(full), log_probabilities(full)).item() == 0
