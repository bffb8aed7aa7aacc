"""`python -m gpipe_hpc`: which commands there are."""

from gpipe_hpc.config.help import list_of_commands

if __name__ == "__main__":
    print(list_of_commands())
