"""Static rules (PLUG-IN): `hx010_dataloader_start_method.py` is rule HX010, `dataloader-start-method`.

A rule is a module with `LEVEL`, `MARKERS` (a file that holds none of these words is not shown to the rule),
`check(source) -> Iterator[Hit]` and its documentation in the docstring: a title, What it checks, Why it matters, Fix.
"""
