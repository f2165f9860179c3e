"""Evaluation: lm-eval with local data, perplexity and recall, untrained baselines, and the comparing report."""
