"""Network layer between ranks: interfaces, addresses, authentication, serialization."""
