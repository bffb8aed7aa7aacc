"""The rooms of the package: where the rebuild stands, and the rules for finished rooms."""
