"""The paper's figures, and some beyond it: measured, drawn, and put on one page.

A figure says which points it needs; points are measured once and kept; figures that need the same
point share it. `run.make_figures` does all of it.
"""
