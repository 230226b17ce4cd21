"""The algorithm as pure tensor functions: skew, low-rank score, query predictor, selection."""
