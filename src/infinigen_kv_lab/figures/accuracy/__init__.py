"""Accuracy figures: what ``infinigen-kv eval`` measures, kept in the same way."""
