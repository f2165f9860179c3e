"""Recurrences of the rules that the gated delta rule computes after a change of its inputs."""
