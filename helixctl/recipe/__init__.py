"""What the user wrote: the schema of a recipe and its loader. Never imports torch."""
