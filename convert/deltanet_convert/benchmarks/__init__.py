"""Commands that measure conversions."""
