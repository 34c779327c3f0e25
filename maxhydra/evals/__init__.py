"""Evaluations of task=eval: tasks of lm-eval and tasks described in YAML files, on the engine and the scorer."""
