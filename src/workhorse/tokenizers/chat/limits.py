"""Limits on a chat template, on its input and output, and on the process that renders it."""

MAX_SOURCE = 100_000
"""Maximum number of characters in a template."""
MAX_TEXT = 4_000_000
"""Maximum number of characters in a chat, before and after rendering."""
MAX_SECONDS = 1.0
"""CPU time limit of one rendering. The first one also compiles the template."""
MAX_WAIT = 10.0
"""Number of seconds after which a process that does not answer is killed."""
MAX_MEMORY = 512 * 2**20
"""Limit of the address space in bytes, including Python and jinja2."""
