"""Side-by-side timing of the operators against their peers, with the result tables kept beside it."""
