"""How messages name a setting: as commands take it, and as scripts do."""


def setting(name: str, value: object) -> str:
    """Return ``train.device=cpu, in a script device="cpu"`` for a setting and its value."""
    return f'{name}={value}, in a script {name.rpartition(".")[2]}="{value}"'
