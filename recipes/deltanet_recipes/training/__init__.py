"""Training of converted models: stages, losses, optimisers, checkpoints, several processes."""

from deltanet_kernels.installed_versions import require

require("accelerate", "datasets", "peft")
