"""Format plans as text."""
