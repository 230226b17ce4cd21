"""The offline part: one pass over sample text gives an artefact that belongs to one model."""
