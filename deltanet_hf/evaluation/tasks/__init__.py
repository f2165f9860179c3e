"""The inputs of an evaluation: lm-eval tasks on the Hub's or on local data, windows of text, and recall probes."""

from deltanet_kernels.installed_versions import require

require("datasets", "lm-eval")
