"""The delta rule with a decay per key channel: Kimi Delta Attention, Gated DeltaNet-2, gated linear attention."""
