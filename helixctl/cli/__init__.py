"""The command line: commands parse, call one function, and render what it returns."""
