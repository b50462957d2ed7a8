"""Files: written whole or not at all; read within limits, since strangers may have made them."""
