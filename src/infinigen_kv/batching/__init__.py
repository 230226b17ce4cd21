"""Rows of different lengths that join, decode together and leave."""
