"""Laboratory: tiny models of any mixer on tasks that show what its state can track and recall."""
