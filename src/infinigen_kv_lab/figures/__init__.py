"""The paper's figures, and some beyond it: measured, drawn, and put on one page for each set.

A figure is one file in the folder of its set and one entry in `catalogue.FIGURES`. It names its
measurements; each is made once, kept, and shared with the other figures that need it.
`run.make_figures` does all of it, on a `rig.MeasurementRig`.
"""
