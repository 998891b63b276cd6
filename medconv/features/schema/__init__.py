"""`medconv schema`: the config as JSON schema, by which editors complete and check YAML files."""

COMMANDS = {"schema": ("print the config's JSON schema, for editors", "medconv.features.schema.command")}
