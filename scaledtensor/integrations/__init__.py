"""Plug-ins of other libraries. Each module imports its library, and nothing imports the modules
but a model of that library or the user."""
