"""How the next token is chosen: filters, penalties, draws."""
