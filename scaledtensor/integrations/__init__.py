"""Plug-ins of other libraries. Each module imports its library. Only the user imports the module,
or `scale_model` for a model of that library."""
