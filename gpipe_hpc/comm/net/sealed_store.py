"""A store whose values only ranks of the job can write."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.torch_compat import PrefixStore, Store


class SealedStore(Store):
    """Another store, with a proof of the job's secret before each value.

    Who reaches the store without the secret can damage it, and so end the job, but not have ranks
    take an address or a report of his. A value is bound to its key. Numbers (`add`) are as they
    were: the server counts them. Raises `ProofError` where a value is not proved.

    torch calls it from C++ and does not keep the Python object alive; of clones that torch asks for
    this does the store that they come from.
    """

    def __init__(self, store: Store, secret: Secret) -> None:
        super().__init__()
        self._store: Any = store  # whose bindings take bytes as well as texts, and can clone
        self._secret = secret
        self._clones: list[SealedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it is there."""
        return self._secret.unseal(f"the store's {key}", self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value if the present one is as expected ('' for none); return what is there."""
        before = self._sealed(key, expected) if expected else b""
        found: bytes = self._store.compare_set(key, before, self._sealed(key, desired))
        return self._secret.unseal(f"the store's {key}", found) if found else b""

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        answer: int = self._store.add(key, amount)
        return answer

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""
        answer: bool = self._store.check(keys)
        return answer

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        if timeout is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        answer: bool = self._store.delete_key(key)
        return answer

    def num_keys(self) -> int:
        """Return how many keys there are."""
        answer: int = self._store.num_keys()
        return answer

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """Return how long `get` and `wait` wait."""
        answer: timedelta = self._store.timeout
        return answer

    def has_extended_api(self) -> bool:
        """Say that values are written and read one by one."""
        return False

    def clone(self) -> "SealedStore":
        """Return a store with a connection of its own."""
        clone = SealedStore(self._store.clone(), self._secret)
        self._clones.append(clone)
        return clone

    def let_go(self, clone: "SealedStore") -> None:
        """Keep a clone alive no longer: whoever uses it does."""
        self._clones = [each for each in self._clones if each is not clone]

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        plain = value.encode() if isinstance(value, str) else value
        return self._secret.seal(f"the store's {key}", plain)


def cloned(store: Store) -> tuple[Store, object]:
    """Return a store with a connection of its own, and what to keep alive while it is used.

    The connection is closed when both are gone. The store itself if it cannot be cloned (a file).
    """
    duplicate: Any = getattr(store, "clone", None)
    try:
        own: Store = store if duplicate is None else duplicate()
    except RuntimeError:
        return store, None
    inner, source = _innermost(own), _innermost(store)
    if inner is not source and isinstance(inner, SealedStore) and isinstance(source, SealedStore):
        source.let_go(inner)
    return own, inner


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
