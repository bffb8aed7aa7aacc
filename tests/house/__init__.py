"""Rules for the structure of the package, and scripts that measure it.

A *room* is a package of `gpipe_hpc` together with the top-level modules that belong to it.
"""
