"""ScaledTensor, the stored tensors beside it, and what they need: verbs, sites, shards, steps."""
