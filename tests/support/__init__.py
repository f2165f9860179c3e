"""Helpers that several test folders share: tiny models, tiny conversions and exports, and the crash-test driver."""
