"""Published formats, one file each, named as the format: ``matches``, ``read``, ``write`` and ``flatten``."""
