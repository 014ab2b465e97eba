"""What scripts/bench runs: makes data, mounts it, measures it against what the same machine can do without a mount."""
