"""Names of settings in messages, for the command line and for scripts."""


def setting(name: str, value: object) -> str:
    """Return ``train.device=cpu, in a script device="cpu"`` for a setting and its value."""
    return f'{name}={value}, in a script {name.rpartition(".")[2]}="{value}"'
