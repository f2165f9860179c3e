"""Evaluation of models.

`measures/` holds the one implementation of each measure, and `measure`, which takes them of a model; it depends on
torch and numpy alone. `tasks/` holds what is measured: lm-eval tasks, texts and recall probes. `report/` compares a
teacher with its students. Loading a model imports nothing from here; lm-eval and datasets come with the extra `eval`.
"""
