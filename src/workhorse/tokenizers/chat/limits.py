"""Limits on the size of a chat template, and on the resources and output of a rendering."""

MAX_SOURCE = 100_000
"""Characters of a template."""
MAX_TEXT = 4_000_000
"""Characters of a chat, before it is rendered and after."""
MAX_SECONDS = 1.0
"""Of processor time, for one rendering; the first one compiles the template, too."""
MAX_WAIT = 10.0
"""Seconds after which a process that does nothing is ended."""
MAX_MEMORY = 512 * 2**20
"""Bytes of address space, with Python and jinja2 in it."""
