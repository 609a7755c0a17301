"""The names of other libraries, for programs written to them: `unit_scaling`, `torchao`."""
