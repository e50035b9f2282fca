"""Report formats (PLUG-IN): `<name>_report.py` is the format `<name>`; it makes text of a report, prints nothing."""
