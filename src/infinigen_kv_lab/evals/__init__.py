"""How good a model's answers stay under a policy: one task per file, behind `task.Task`.

`registry.make_task` makes a task by name and `run.evaluate` measures policies on it.
"""
