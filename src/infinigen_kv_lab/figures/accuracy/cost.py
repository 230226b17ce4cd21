"""How long trials take relative to each other, for an estimate of the time left."""

from __future__ import annotations

from infinigen_kv_lab.evals.windows import DEFAULT_WINDOW
from infinigen_kv_lab.figures.accuracy.trial import Trial

# Seconds of a 135M model on one core; only their relations matter.
PER_TOKEN = 4e-3
LONG = 4000  # tokens at which attention doubles what reading one costs
STEP = 0.06  # of one token by itself
TOKENS = {"passkey": 3000, "rte": 600, "piqa": 400, "copa": 250, "openbookqa": 300}
SAMPLES = 30  # where all of a task's are wanted


def expected_seconds(trial: Trial) -> float:
    """A trial's time, up to a factor that all trials of a model share."""
    options = trial.options
    samples = trial.samples or SAMPLES
    window = options.window or DEFAULT_WINDOW
    if trial.task in ("needles", "sparsity"):
        window = sum(options.lengths) // len(options.lengths)
    window = TOKENS.get(trial.task, window)
    read = PER_TOKEN * window * (1 + window / LONG)
    total = samples * len(trial.policies) * read
    if trial.storage.capacity is not None or trial.storage.codec != "none":
        decoded = window - (options.prompt_tokens or window * 2 // 3)
        total += samples * len(trial.policies) * decoded * STEP
    return total
