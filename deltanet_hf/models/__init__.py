"""Converted models of every family: classes, configurations, layer tables, and what changes a model that is loaded."""
