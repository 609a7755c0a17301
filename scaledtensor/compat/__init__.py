"""Other libraries' names for what is here, each a package of its own: `unit_scaling`, `torchao`."""
