"""ScaledTensor and the stored tensors, with their verbs, sites, parts, files and hooks of steps."""
