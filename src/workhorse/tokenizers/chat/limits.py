"""Limits on a chat template, on its input and output, and on the process that renders it."""

MAX_SOURCE = 100_000
"""Characters in a template."""
MAX_TEXT = 4_000_000
"""Characters in a chat, both before and after rendering."""
MAX_SECONDS = 1.0
"""CPU time for one rendering; the first also compiles the template."""
MAX_WAIT = 10.0
"""Seconds after which a process that does not answer is killed."""
MAX_MEMORY = 512 * 2**20
"""Bytes of address space, including Python and jinja2."""
