"""What the operator's bench knows, beside its commands: mostly plain functions, tested without a network."""
