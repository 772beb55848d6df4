"""Names of models, for whoever only has to pass one on: importing this loads no model library."""

DEFAULT_MODEL = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct, whose weights ship in a package: no model hub is needed."""
