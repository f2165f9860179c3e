"""Measures of a model, each with its standard error: perplexity, KL divergence, exact repeat, recall, speed."""
