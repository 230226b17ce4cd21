"""The paper's accuracy figures and tables, and what it left unmeasured.

The points of a figure are evaluations: what ``infinigen-kv eval`` measures, kept in the same way.
"""
