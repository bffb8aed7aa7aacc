"""How ranks reach each other: interfaces, addresses, secret, control messages."""
