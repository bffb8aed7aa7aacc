"""This process and the machine that it is on."""
