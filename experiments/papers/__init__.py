"""The papers' tables: exact figures held to be equal, simulated ones beside the paper's."""
