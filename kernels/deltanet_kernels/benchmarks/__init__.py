"""Side-by-side timings against other implementations; results are kept with machine and versions."""
